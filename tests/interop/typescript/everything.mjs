// What the stock TypeScript client gets of npm's server-everything, as one JSON object:
// `everything.mjs stdio PROGRAM` of the server itself, `everything.mjs http URL` behind a layer.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import {
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ListRootsRequestSchema,
  LoggingMessageNotificationSchema,
  ResourceUpdatedNotificationSchema,
} from "@modelcontextprotocol/sdk/types.js";

const [kind, place] = process.argv.slice(2);
const transport =
  kind === "stdio"
    ? new StdioClientTransport({ command: process.execPath, args: [place], stderr: "ignore" })
    : new StreamableHTTPClientTransport(new URL(place));

const client = new Client(
  { name: "typescript-1", version: "1.0" },
  { capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } } },
);
const asked = [];
client.setRequestHandler(ElicitRequestSchema, ({ params }) => {
  asked.push(params.message);
  return { action: "accept", content: { name: "Ann", check: true } };
});
client.setRequestHandler(CreateMessageRequestSchema, ({ params }) => {
  asked.push(params.messages[0].content);
  return { role: "assistant", model: "interop", content: { type: "text", text: "sampled" } };
});
client.setRequestHandler(ListRootsRequestSchema, () => ({ roots: [{ uri: "file:///interop", name: "interop" }] }));

// The first of each kind that comes by itself, once it is here.
function first(schema) {
  return new Promise((resolve) =>
    client.setNotificationHandler(schema, ({ params }) => resolve(params)),
  );
}
const logged = first(LoggingMessageNotificationSchema);
const updated = first(ResourceUpdatedNotificationSchema);

await client.connect(transport);
const seen = {
  server: client.getServerVersion(),
  instructions: client.getInstructions(),
  tools: (await client.listTools()).tools,
  prompts: (await client.listPrompts()).prompts,
  resources: (await client.listResources()).resources,
  templates: (await client.listResourceTemplates()).resourceTemplates,
};
const calls = {
  echo: { message: "hello" },
  "get-sum": { a: 1, b: 2 },
  "get-structured-content": { location: "New York" },
  "get-tiny-image": {},
  "get-annotated-message": { messageType: "success", includeImage: true },
  "get-resource-links": { count: 3 },
  "get-resource-reference": { resourceType: "Text", resourceId: 1 },
  "trigger-elicitation-request": {},
  "trigger-sampling-request": { prompt: "x", maxTokens: 10 },
  "get-roots-list": {},
};
seen.calls = {};
for (const [name, args] of Object.entries(calls)) {
  seen.calls[name] = await client.callTool({ name, arguments: args });
}
seen.asked = asked;
const reports = [];
seen.long = await client.callTool(
  { name: "trigger-long-running-operation", arguments: { duration: 0.3, steps: 3 } },
  undefined,
  { onprogress: (report) => reports.push(report) },
);
// What comes with the answer may come after it.
seen.reports = reports.slice(0, 2);
seen.prompt = await client.getPrompt({ name: seen.prompts[0].name, arguments: {} });
seen.resource = await client.readResource({ uri: seen.resources[0].uri });
seen.completion = await client.complete({
  ref: { type: "ref/prompt", name: "completable-prompt" },
  argument: { name: "department", value: "E" },
});
seen.missing = await client
  .readResource({ uri: "demo://no/such" })
  .catch(({ code }) => ({ code }));
await client.setLoggingLevel("debug");
await client.callTool({ name: "toggle-simulated-logging", arguments: {} });
seen.logged = Object.keys(await logged).sort();
const uri = seen.resources[0].uri;
await client.subscribeResource({ uri });
await client.callTool({ name: "toggle-subscriber-updates", arguments: {} });
seen.updated = (await updated).uri === uri;
console.log(JSON.stringify(seen));
await client.close();
process.exit(0);
