// Drives the stock TypeScript client by commands on stdin, one JSON object per line.
//
// A command is {"id", "op", "client", ...}; its answer {"id", "result"} or {"id", "error"}.
// In between come events {"client", "event", ...}: every message as the transport received
// it, and what the client's own handlers were called with. tests/interop/driver.py is the
// other end; python1/driver.py speaks the same language.

import { createInterface } from "node:readline";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import {
  CallToolResultSchema,
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ListRootsRequestSchema,
  LoggingMessageNotificationSchema,
  ResultSchema,
} from "@modelcontextprotocol/sdk/types.js";

const clients = new Map();
const cancels = new Map();

function emit(line) {
  process.stdout.write(JSON.stringify(line) + "\n");
}

function makeClient(handle) {
  const client = new Client(
    { name: "typescript-1", version: "1.0" },
    { capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } } },
  );
  client.setRequestHandler(ElicitRequestSchema, (request) => ({
    action: "accept",
    content: { answer: `answer to ${request.params.message}` },
  }));
  client.setRequestHandler(CreateMessageRequestSchema, (request) => ({
    role: "assistant",
    model: "interop",
    content: { type: "text", text: `sampled ${firstText(request.params.messages[0].content)}` },
  }));
  client.setRequestHandler(ListRootsRequestSchema, () => ({
    roots: [{ uri: "file:///interop", name: "interop" }],
  }));
  client.setNotificationHandler(LoggingMessageNotificationSchema, (notification) =>
    emit({ client: handle, event: "log", data: notification.params.data }),
  );
  client.onerror = (error) => emit({ client: handle, event: "error", text: String(error) });
  return client;
}

function firstText(content) {
  return Array.isArray(content) ? content[0].text : content.text;
}

function sessionIdOf({ transport }) {
  return transport.sessionId ?? null;
}

const operations = {
  async connect({ client: handle, url, session_id, protocol_version, terminate }) {
    const transport = new StreamableHTTPClientTransport(new URL(url), {
      sessionId: session_id ?? undefined,
      reconnectionOptions: {
        initialReconnectionDelay: 100,
        maxReconnectionDelay: 500,
        reconnectionDelayGrowFactor: 1.5,
        maxRetries: 5,
      },
    });
    // The client chains onto a handler that is already there, so this sees raw messages.
    transport.onmessage = (message) => emit({ client: handle, event: "message", message });
    if (protocol_version) transport.setProtocolVersion(protocol_version);
    const client = makeClient(handle);
    clients.set(handle, { client, transport, terminate });
    await client.connect(transport);
    return { session_id: sessionIdOf({ transport }) };
  },
  async session_id(_, entry) {
    return sessionIdOf(entry);
  },
  async list({ what }, { client }) {
    switch (what) {
      case "tools":
        return (await client.listTools()).tools.map((tool) => tool.name);
      case "resources":
        return (await client.listResources()).resources.map((resource) => resource.uri);
      case "templates":
        return (await client.listResourceTemplates()).resourceTemplates.map((t) => t.uriTemplate);
      case "prompts":
        return (await client.listPrompts()).prompts.map((prompt) => prompt.name);
    }
    throw new Error(`no list of ${what}`);
  },
  async call({ client: handle, tool, arguments: args, key, progress, resume_from }, { client }) {
    const abort = new AbortController();
    cancels.set(key, abort);
    const options = {
      signal: abort.signal,
      timeout: 30_000,
      onresumptiontoken: (token) => emit({ client: handle, event: "token", key, token }),
    };
    if (progress) {
      options.onprogress = (step) =>
        emit({ client: handle, event: "progress", key, progress: step.progress });
    }
    if (resume_from) options.resumptionToken = resume_from;
    try {
      const params = { name: tool, arguments: args };
      const result = await client.callTool(params, CallToolResultSchema, options);
      return { text: result.content[0].text, is_error: result.isError ?? false };
    } finally {
      cancels.delete(key);
    }
  },
  async cancel({ key }) {
    cancels.get(key).abort("the user changed their mind");
    return {};
  },
  async read({ uri }, { client }) {
    return (await client.readResource({ uri })).contents[0].text;
  },
  async prompt({ name, arguments: args }, { client }) {
    return (await client.getPrompt({ name, arguments: args })).messages[0].content.text;
  },
  async subscribe({ uri }, { client }) {
    return await client.subscribeResource({ uri });
  },
  async unsubscribe({ uri }, { client }) {
    return await client.unsubscribeResource({ uri });
  },
  async ping(_, { client }) {
    return await client.ping();
  },
  async request({ method, params }, { client }) {
    return await client.request({ method, params }, ResultSchema, { timeout: 30_000 });
  },
  async close({ client: handle }, { client, transport, terminate }) {
    clients.delete(handle);
    try {
      if (terminate) await transport.terminateSession();
    } finally {
      await client.close();
    }
    return {};
  },
};

async function run(command) {
  // First let node see what else has happened by now. fetch() would send on a connection whose
  // reset waits in the same batch of events as this command, and fail.
  await new Promise(setImmediate);
  try {
    const entry = clients.get(command.client);
    const result = await operations[command.op](command, entry);
    emit({ id: command.id, result: result ?? null });
  } catch (error) {
    const { code = null, message, data = null, stack, cause } = error;
    const text = `${message ?? error}${cause ? ` (${cause})` : ""}`;
    emit({ id: command.id, error: { code, message: text, data, stack } });
  }
}

createInterface({ input: process.stdin })
  .on("line", (line) => run(JSON.parse(line)))
  .on("close", () => process.exit(0));
emit({ event: "ready" });
