// The official TypeScript SDK, release 2.
import { createRequire } from "node:module";
import { main } from "./checks.mjs";

const load = createRequire(`${process.env.NODE_FOLDER}/`);
const { Client, StreamableHTTPClientTransport } = load("@modelcontextprotocol/client");
const { StdioClientTransport } = load("@modelcontextprotocol/client/stdio");

await main(async (target) => {
  const client = new Client({ name: "interop", version: "1" }, { versionNegotiation: { mode: process.env.ERA || "auto" } });
  const started = Array.isArray(target) && new StdioClientTransport({ command: target[0], args: target.slice(1), stderr: "ignore" });
  await client.connect(started || new StreamableHTTPClientTransport(new URL(target)));
  return client;
});
