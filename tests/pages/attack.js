// Everything a page can try against the server at `target`; returns all that it got to read.
async (target) => {
  const seen = [];
  const call = `${target}/explorer/tools/t.one/call`;
  const message = { jsonrpc: "2.0", id: 1, method: "tools/call", params: { name: "t.one", arguments: {} } };
  const tries = ["/explorer/", "/explorer/tools", "/explorer/tools/t.one", "/health", "/metrics"].map((path) => fetch(target + path));
  for (const type of ["text/plain", "application/json", "application/x-www-form-urlencoded"]) {
    for (const mode of ["cors", "no-cors"]) {
      const options = { method: "POST", mode, headers: { "Content-Type": type }, credentials: "include" };
      tries.push(fetch(call, { ...options, body: "{}" }), fetch(`${target}/mcp`, { ...options, body: JSON.stringify(message) }));
    }
  }
  const read = (answer) => answer.then((response) => response.text()).then((text) => seen.push(text), () => null);
  await Promise.all(tries.map(read));
  navigator.sendBeacon(call, "{}");
  navigator.sendBeacon(call, new Blob(["{}"], { type: "application/json" }));

  const make = (tag, properties) => Object.assign(document.createElement(tag), properties);
  const load = (node) => new Promise((done) => {
    node.onload = node.onerror = () => done(node);
    document.body.append(node);
  });
  await load(make("script", { src: `${target}/explorer/tools` }));
  const frame = await load(make("iframe", { src: `${target}/explorer/`, name: "frame" }));
  try {
    seen.push(frame.contentDocument ? frame.contentDocument.title : "");
  } catch {
    // no reading across origins
  }
  const form = make("form", { action: call, method: "post", enctype: "text/plain", target: "frame" });
  form.append(make("input", { name: '{"a":"', value: '"}' }));
  document.body.append(form);
  const answered = new Promise((done) => { frame.onload = done; });
  form.submit();
  await answered;
  return seen.join("");
}
