// The official TypeScript SDK, release 1.
import { createRequire } from "node:module";
import { main } from "./checks.mjs";

const load = createRequire(`${process.env.NODE_FOLDER}/`);
const { Client } = load("@modelcontextprotocol/sdk/client/index.js");
const { StdioClientTransport } = load("@modelcontextprotocol/sdk/client/stdio.js");
const { StreamableHTTPClientTransport } = load("@modelcontextprotocol/sdk/client/streamableHttp.js");

await main(async (target) => {
  const client = new Client({ name: "interop", version: "1" });
  const started = Array.isArray(target) && new StdioClientTransport({ command: target[0], args: target.slice(1), stderr: "ignore" });
  await client.connect(started || new StreamableHTTPClientTransport(new URL(target)));
  return client;
});
