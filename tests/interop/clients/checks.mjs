// The checks of checks.py, for clients in JavaScript. `connect(target)` is given a URL or a command with its arguments.

export async function main(connect) {
  const [first, ...rest] = process.argv.slice(2);
  const client = await connect(first.startsWith("http") ? first : [first, ...rest]);
  const told = {}, given = (holds, instead) => (holds ? "yes" : JSON.stringify(instead).slice(0, 200));
  const names = (await client.listTools()).tools.map((tool) => tool.name);
  const workdays = names.find((name) => /^calendar.workdays$/.test(name));
  told.list = given(names.length === 14, names);
  const call = (name, args) => client.callTool({ name, arguments: args });
  const good = await call(workdays, { start: "2026-01-01", end: "2026-01-12" });
  told["structured output"] = given(good.structuredContent?.workdays === 8 && !good.isError, good);
  const bad = await call(workdays, { start: "soon", end: "2026-01-12" });
  told["validation error"] = given(bad.isError && bad.content[0].text.includes("- start: "), bad);
  const none = await call("no.such_tool", {});
  told["unknown tool"] = given(none.isError && none.content[0].text.includes("no.such_tool"), none);
  const { contents } = await client.readResource({ uri: "docs://finance.loan_schedule" });
  told.resource = given(contents[0].text.includes("annuity"), contents);
  await client.close();
  console.log(JSON.stringify(told));
  process.exit();
}

setTimeout(() => { console.error("60 seconds have passed"); process.exit(1); }, 60_000).unref();
