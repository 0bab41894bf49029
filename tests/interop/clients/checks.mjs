// The checks of checks.py, for clients in JavaScript. `connect(target)` is given a URL or a command with its arguments.

async function checkEvery(client, tools) {
  const names = (await client.listTools()).tools.map((tool) => tool.name), wrong = [];
  const more = names.filter((name) => !(name in tools)), less = Object.keys(tools).filter((name) => !names.includes(name));
  if (more.length || less.length) wrong.push(`lists ${more} more and ${less} less`);
  for (const name of names.filter((name) => name in tools)) {
    const result = await client.callTool({ name, arguments: tools[name] }).catch((error) => ({ isError: true, content: String(error) }));
    if (result.isError) wrong.push(`${name}: ${JSON.stringify(result.content).slice(0, 150)}`);
  }
  return { "hostile schemas": wrong.join("; ") || "yes" };
}

async function check(client) {
  const told = {}, given = (holds, instead) => (holds ? "yes" : JSON.stringify(instead).slice(0, 200));
  const names = (await client.listTools()).tools.map((tool) => tool.name);
  const workdays = names.find((name) => /^calendar.workdays$/.test(name));
  told.list = given(names.length === Number(process.env.TOOLS), names);
  const call = (name, args) => client.callTool({ name, arguments: args });
  const good = await call(workdays, { start: "2026-01-01", end: "2026-01-12" });
  told["structured output"] = given(good.structuredContent?.workdays === 8 && !good.isError, good);
  const bad = await call(workdays, { start: "soon", end: "2026-01-12" });
  told["validation error"] = given(bad.isError && bad.content[0].text.includes("- start: "), bad);
  const none = await call("no.such_tool", {});
  told["unknown tool"] = given(none.isError && none.content[0].text.includes("no.such_tool"), none);
  const { contents } = await client.readResource({ uri: "docs://finance.loan_schedule" });
  told.resource = given(contents[0].text.includes("annuity"), contents);
  return told;
}

export async function main(connect) {
  const [first, ...rest] = process.argv.slice(2), every = process.env.EVERY_TOOL;
  const client = await connect(first.startsWith("http") ? first : [first, ...rest]);
  const told = await (every ? checkEvery(client, JSON.parse(every)) : check(client));
  await client.close();
  console.log(JSON.stringify(told));
  process.exit();
}

setTimeout(() => { console.error("60 seconds have passed"); process.exit(1); }, 60_000).unref();
