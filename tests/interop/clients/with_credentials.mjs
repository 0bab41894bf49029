// The official TypeScript SDK, release 2, as a program with credentials of its own: prints whom the server takes it for.
import { createRequire } from "node:module";

const load = createRequire(`${process.env.NODE_FOLDER}/`);
const { Client, ClientCredentialsProvider, StreamableHTTPClientTransport } = load("@modelcontextprotocol/client");
const [url, expectedIssuer, clientId, clientSecret] = process.argv.slice(2);
const authProvider = new ClientCredentialsProvider({ clientId, clientSecret, expectedIssuer });
const client = new Client({ name: "interop", version: "1" }, { versionNegotiation: { mode: "auto" } });
await client.connect(new StreamableHTTPClientTransport(new URL(url), { authProvider }));
console.log(JSON.stringify((await client.callTool({ name: "whoami", arguments: {} })).structuredContent.result));
await client.close();
