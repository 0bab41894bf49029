// An authorization server made of the package oidc-provider: `ISSUER` (with a path or without) on port `PORT`. Clients
// register themselves, anybody logs in under any name, and access tokens are JWTs for the resource that was asked for.
import { createServer } from "node:http";
import { createRequire } from "node:module";
import { generateKeyPairSync } from "node:crypto";
import { pathToFileURL } from "node:url";

const found = createRequire(`${process.env.NODE_FOLDER}/`).resolve("oidc-provider");
const { default: Provider } = await import(pathToFileURL(found));

const key = { ...generateKeyPairSync("ec", { namedCurve: "P-256" }).privateKey.export({ format: "jwk" }), alg: "ES256", use: "sig" };
const issuer = process.env.ISSUER, path = new URL(issuer).pathname.replace(/\/$/, "");
const provider = new Provider(issuer, {
  clients: [{
    client_id: "robot", client_secret: "its-secret", grant_types: ["client_credentials"], token_endpoint_auth_method: "client_secret_post",
    redirect_uris: [], response_types: [],
  }],
  jwks: { keys: [key] },
  clientDefaults: { id_token_signed_response_alg: "ES256" },
  scopes: ["openid", "offline_access", "tools", "destructive"],
  responseTypes: ["code"],
  findAccount: (ctx, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  issueRefreshToken: (ctx, client) => client.grantTypeAllowed("refresh_token"),
  features: {
    clientCredentials: { enabled: true },
    registration: { enabled: true },
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: (ctx, resource) => ({
        scope: "tools destructive", audience: resource, accessTokenFormat: "jwt", jwt: { sign: { alg: "ES256" } },
      }),
      useGrantedResource: () => true,
    },
  },
});

const handle = provider.callback();
createServer((request, response) => {
  // OAuth's place of the metadata of an issuer with a path is before the path: the provider has it behind.
  const wellKnown = "/.well-known/oauth-authorization-server";
  request.originalUrl = request.url === `${wellKnown}${path}` ? `${path}${wellKnown}` : request.url;
  if (!request.originalUrl.startsWith(`${path}/`)) return response.writeHead(404).end();
  request.url = request.originalUrl.slice(path.length);
  handle(request, response);
}).listen(Number(process.env.PORT), "127.0.0.1");
