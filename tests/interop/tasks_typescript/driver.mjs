// The stock TypeScript client of tasks: `driver.mjs URL` calls tools of a server, and prints what
// became of each as one line of JSON.

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { createTaskSessionFromClient } from "@modelcontextprotocol/ext-tasks/client";

const url = process.argv[2];
const VERSION = "2026-07-28";
const clientInfo = { name: "typescript-tasks", version: "1.0" };
const clientCapabilities = {
  elicitation: {},
  extensions: { "io.modelcontextprotocol/tasks": {} },
};
let numbers = 0;

// The package asks its host for this: the codecs of the client refuse tasks.
async function rawDispatch(request, options = {}) {
  const { method, params } = request;
  const headers = new Headers({
    "content-type": "application/json",
    accept: "application/json, text/event-stream",
    "mcp-protocol-version": VERSION,
    "mcp-method": method,
    "mcp-name": params.taskId ?? params.name,
  });
  for (const [name, value] of Object.entries(options.context?.headers ?? {})) {
    headers.set(name, value);
  }
  const response = await fetch(url, {
    method: "POST",
    signal: options.signal,
    headers,
    body: JSON.stringify({ jsonrpc: "2.0", id: `raw-${++numbers}`, method, params }),
  });
  const text = await response.text();
  const streamed = text.split("\n").filter((line) => line.startsWith("data: {"));
  const message = JSON.parse(streamed.length ? streamed.at(-1).slice(6) : text);
  return message.error
    ? { kind: "error", error: message.error }
    : { kind: "result", result: message.result };
}

const client = new Client(clientInfo, {
  capabilities: clientCapabilities,
  versionNegotiation: { mode: { pin: VERSION } },
});
await client.connect(new StreamableHTTPClientTransport(new URL(url)));
const session = createTaskSessionFromClient(client, {
  endpointId: "interop",
  rawDispatch,
  v2RequestFraming: { protocolVersion: VERSION, clientInfo, clientCapabilities },
  onInputRequest: async (request) => ({
    action: "accept",
    content: { answer: `answer to ${request.params.message}` },
  }),
});

async function called(tool, then = async () => {}) {
  const execution = await session.callTool(tool, {});
  const settled = execution.settle();
  await then(execution);
  const { outcome } = await settled;
  console.log(
    JSON.stringify({
      tool,
      kind: execution.kind,
      status: outcome.status,
      text: outcome.result?.content?.[0]?.text ?? null,
    }),
  );
}

await called("quick");
await called("slow");
await called("ask_two");
await called("endless", (execution) => execution.cancel());
await session.close();
await client.close();
process.exit(0);
