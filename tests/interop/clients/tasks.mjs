// The client of the tasks extension, over the official TypeScript SDK. `main.mjs URL` or `main.mjs COMMAND ...`.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const load = createRequire(`${process.env.NODE_FOLDER}/`);
const { Client, StreamableHTTPClientTransport } = load("@modelcontextprotocol/client");
const { StdioClientTransport } = load("@modelcontextprotocol/client/stdio");
const extension = `${process.env.NODE_FOLDER}/node_modules/@modelcontextprotocol/ext-tasks/dist/client/index.js`;
const { createTaskSessionFromClient, createApplicationInputHandler } = await import(pathToFileURL(extension));

const [target, ...rest] = process.argv.slice(2), isHttp = target.startsWith("http");
const framing = {
  protocolVersion: "2026-07-28",
  clientInfo: { name: "interop", version: "1" },
  clientCapabilities: { elicitation: { form: {} } },
};
const client = new Client(framing.clientInfo, { versionNegotiation: { mode: "auto" }, capabilities: framing.clientCapabilities });
const transport = isHttp
  ? new StreamableHTTPClientTransport(new URL(target))
  : new StdioClientTransport({ command: target, args: rest, stderr: "ignore" });
await client.connect(transport);

// What the SDK's client cannot send, as it does not know the shapes of tasks: the host sends it.
const waiting = new Map(), inner = transport.onmessage;
let number = 0;
transport.onmessage = (message, extra) => (waiting.has(message.id) ? waiting.get(message.id)(message) : inner?.(message, extra));

async function overHttp(message, headers) {
  const routing = { "Mcp-Protocol-Version": framing.protocolVersion, "Mcp-Method": message.method };
  if (message.method === "tools/call") routing["Mcp-Name"] = message.params.name;
  const common = { "Content-Type": "application/json", Accept: "application/json, text/event-stream" };
  const body = JSON.stringify(message);
  const text = await (await fetch(target, { method: "POST", headers: { ...common, ...routing, ...headers }, body })).text();
  const events = text.split("\n").filter((line) => line.startsWith("data: {"));
  return JSON.parse(events.length ? events.at(-1).slice(6) : text);
}

function overStdio(message) {
  const answer = new Promise((resolve) => waiting.set(message.id, resolve));
  transport.send(message);
  return answer.finally(() => waiting.delete(message.id));
}

async function rawDispatch(request, options) {
  const message = { jsonrpc: "2.0", id: `task-${++number}`, ...request };
  const answer = await (isHttp ? overHttp(message, options?.context?.headers) : overStdio(message));
  return answer.error ? { kind: "error", error: answer.error } : { kind: "result", result: answer.result };
}

const asked = [], seen = [];
const onInputRequest = createApplicationInputHandler({
  elicitation: (request) => {
    asked.push(request.params.message);
    return { action: "accept", content: { title: "Good news" } };
  },
});
const session = createTaskSessionFromClient(client, { endpointId: "interop", rawDispatch, v2RequestFraming: framing, onInputRequest });

const told = {}, given = (holds, instead) => (holds ? "yes" : JSON.stringify(instead).slice(0, 200));
const text = (outcome) => outcome.result?.content?.[0]?.text ?? JSON.stringify(outcome);
const compiled = await session.callTool("report.compile", { pages: 3 });
told.task = given(compiled.kind === "task", compiled.kind);
const settled = await compiled.settle({ onEvent: (event) => void seen.push(event.task?.statusMessage) });
told.progress = given(seen.some((message) => /^[123]\/3 Compiling$/.test(message)), seen);
told.result = given(text(settled.outcome).includes("compiled 3 pages"), settled.outcome);
const published = await (await session.callTool("report.publish", {})).settle();
told.question = given(asked.length === 1 && text(published.outcome).includes("published as Good news"), [asked, published.outcome]);
const endless = await session.callTool("report.wait", {});
await endless.cancel();
const ended = await endless.settle();
told.cancelled = given(ended.outcome.status === "cancelled", ended.outcome);
await session.close();
await client.close();
console.log(JSON.stringify(told));
process.exit();
