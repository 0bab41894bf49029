// A host of MCP Apps, made of the official `AppBridge`: `show` shows a tool's page, and `leave` lets it go.
import { AppBridge, PostMessageTransport, getToolUiResourceUri } from "@modelcontextprotocol/ext-apps/app-bridge";

let bridge = null;

window.pageOf = getToolUiResourceUri;

window.show = async ({ tool, inputs, result }) => {
  const frame = document.querySelector("iframe");
  const context = { toolInfo: { tool }, theme: "dark", displayMode: "inline" };
  bridge = new AppBridge(null, { name: "host", version: "1.0.0" }, {}, { hostContext: context });
  const sized = new Promise((resolve) => { bridge.onsizechange = ({ height }) => resolve(height); });
  const initialized = new Promise((resolve) => { bridge.oninitialized = resolve; });
  await bridge.connect(new PostMessageTransport(frame.contentWindow, frame.contentWindow));
  frame.src = "http://view.example/";
  await initialized;
  await bridge.sendToolInput({ arguments: inputs });
  await bridge.sendToolResult(result);
  return { name: bridge.getAppVersion().name, height: await sized };
};

window.leave = () => bridge.teardownResource({});
