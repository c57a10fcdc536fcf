// What the stock TypeScript v2 client gets of npm's server-everything behind a layer, in one era:
// `everything.mjs URL MODE`; as one JSON object, without what only that era says.

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

const [url, mode] = process.argv.slice(2);
const client = new Client(
  { name: "typescript-2", version: "1.0" },
  {
    capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } },
    versionNegotiation: { mode: mode === "legacy" ? mode : { pin: mode } },
  },
);
const asked = [];
client.setRequestHandler("elicitation/create", ({ params }) => {
  asked.push(params.message);
  return { action: "accept", content: { name: "Ann", check: true } };
});
client.setRequestHandler("sampling/createMessage", ({ params }) => {
  asked.push(params.messages[0].content);
  return { role: "assistant", model: "interop", content: { type: "text", text: "sampled" } };
});
client.setRequestHandler("roots/list", () => ({ roots: [{ uri: "file:///interop", name: "interop" }] }));

await client.connect(new StreamableHTTPClientTransport(new URL(url)));
const seen = {
  version: client.getNegotiatedProtocolVersion(),
  tools: (await client.listTools()).tools,
  prompts: (await client.listPrompts()).prompts,
  resources: (await client.listResources()).resources,
  templates: (await client.listResourceTemplates()).resourceTemplates,
  calls: {},
};
for (const [name, args] of Object.entries(JSON.parse(process.env.CALLS))) {
  const { content, structuredContent } = await client.callTool({ name, arguments: args });
  seen.calls[name] = { content, ...(structuredContent && { structuredContent }) };
}
seen.asked = asked;
const { contents } = await client.readResource({ uri: seen.resources[0].uri });
seen.resource = { contents };
const { completion } = await client.complete({
  ref: { type: "ref/prompt", name: "completable-prompt" },
  argument: { name: "department", value: "E" },
});
seen.completion = { completion };
console.log(JSON.stringify(seen));
await client.close();
process.exit(0);
