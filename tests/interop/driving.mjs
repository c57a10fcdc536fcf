// Drives a stock TypeScript client by commands on stdin, one JSON object per line.
//
// A command is {"id", "op", "client", ...}; its answer {"id", "result"} or {"id", "error"}.
// In between come events {"client", "event", ...}: every message as the transport received
// it, and what the client's own handlers were called with. tests/interop/driver.py is the
// other end; python1/driver.py speaks the same language. What differs between the releases of
// the client is in typescript/driver.mjs and typescript2/driver.mjs, which call `drive`.

import { createInterface } from "node:readline";

export const TIMEOUT = 30_000;
export const CAPABILITIES = { sampling: {}, elicitation: {}, roots: { listChanged: true } };
const RECONNECTION = {
  initialReconnectionDelay: 100,
  maxReconnectionDelay: 500,
  reconnectionDelayGrowFactor: 1.5,
  maxRetries: 5,
};
const LOG_LEVEL = "io.modelcontextprotocol/logLevel";

const clients = new Map();
const cancels = new Map();

export function emit(line) {
  process.stdout.write(JSON.stringify(line) + "\n");
}

// What every client here answers. It is given `on(name, handler)`, by the method's name.
export function answer(handle, on) {
  on("elicitation/create", ({ params }) => {
    emit({ client: handle, event: "asked", message: params.message });
    return { action: "accept", content: answersTo(params) };
  });
  on("sampling/createMessage", ({ params }) => ({
    role: "assistant",
    model: "interop",
    content: { type: "text", text: `sampled ${firstText(params.messages[0].content)}` },
  }));
  on("roots/list", () => ({ roots: [{ uri: "file:///interop", name: "interop" }] }));
}

function answersTo({ message, requestedSchema }) {
  const answers = {};
  for (const [name, { type }] of Object.entries(requestedSchema.properties)) {
    answers[name] = type === "integer" ? 4 : `answer to ${message}`;
  }
  return answers;
}

function firstText(content) {
  return Array.isArray(content) ? content[0].text : content.text;
}

function sessionIdOf({ transport }) {
  return transport.sessionId ?? null;
}

async function cancellable(key, run) {
  const abort = new AbortController();
  cancels.set(key, abort);
  try {
    return await run({ timeout: TIMEOUT, signal: abort.signal });
  } finally {
    cancels.delete(key);
  }
}

// `makeTransport(url, options, command)` and `makeClient(handle, command)` give the stock ones;
// `callTool` and `request` are theirs, as (client, params, options); `opened(client)` tells what
// a connected one knows; `more` has the operations that only this release has.
export function drive({ makeTransport, makeClient, callTool, request, opened, more }) {
  const operations = {
    async connect(command) {
      const { client: handle, url, session_id, terminate = true } = command;
      const options = { sessionId: session_id ?? undefined, reconnectionOptions: RECONNECTION };
      const transport = makeTransport(new URL(url), options, command);
      // The client chains onto a handler that is already there, so this sees raw messages.
      transport.onmessage = (message) => emit({ client: handle, event: "message", message });
      const client = makeClient(handle, command);
      client.onerror = (error) => emit({ client: handle, event: "error", text: String(error) });
      const closed = new Promise((resolve) => (client.onclose = resolve));
      clients.set(handle, { client, transport, terminate, closed });
      try {
        await client.connect(transport, { timeout: TIMEOUT });
      } catch (error) {
        clients.delete(handle);
        await client.close();
        throw error;
      }
      return { session_id: sessionIdOf({ transport }), ...opened?.(client) };
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
    async call(command, { client }) {
      const { client: handle, tool, arguments: args, key, progress, resume_from, log_level } = command;
      const params = { name: tool, arguments: args };
      if (log_level) params._meta = { [LOG_LEVEL]: log_level };
      const result = await cancellable(key, (options) => {
        options.onresumptiontoken = (token) => emit({ client: handle, event: "token", key, token });
        if (progress) {
          options.onprogress = (step) =>
            emit({ client: handle, event: "progress", key, progress: step.progress });
        }
        if (resume_from) options.resumptionToken = resume_from;
        return callTool(client, params, options);
      });
      return {
        text: result.content[0].text,
        is_error: result.isError ?? false,
        structured: result.structuredContent ?? null,
      };
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
    async request({ method, params, key }, { client }) {
      return await cancellable(key, (options) => request(client, { method, params }, options));
    },
    async close({ client: handle }, { client, transport, terminate, closed }) {
      clients.delete(handle);
      try {
        // One over WebSocket has nothing to terminate.
        if (terminate) await transport.terminateSession?.();
      } finally {
        await client.close();
        await closed;
      }
      return {};
    },
    ...more,
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
}
