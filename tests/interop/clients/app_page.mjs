// A page of MCP Apps, made with the official `App`: it shows what its host answers and sends.
import { App } from "@modelcontextprotocol/ext-apps";

const seen = {};
function show(name, value) {
  seen[name] = value;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}

async function main() {
  const app = new App({ name: "page", version: "1.0.0" }, { availableDisplayModes: ["inline", "fullscreen"] });
  app.ontoolinput = ({ arguments: inputs }) => show("arguments", inputs);
  app.ontoolresult = ({ structuredContent }) => show("result", structuredContent);
  app.onteardown = () => ({});
  await app.connect();
  show("host", app.getHostVersion().name);
  show("theme", app.getHostContext().theme);
  show("tool", app.getHostContext().toolInfo.tool.name);
  show("mode", (await app.requestDisplayMode({ mode: "fullscreen" })).mode);
  try {
    await app.callServerTool({ name: "t.page", arguments: {} });
    show("call", "was let through");
  } catch (error) {
    show("call", String(error.message));
  }
}
main();
