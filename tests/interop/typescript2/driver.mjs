// Drives the stock TypeScript v2 client by commands on stdin, one JSON object per line.
//
// It speaks the language of typescript/driver.mjs; tests/interop/driver.py is the other end.
// What only this client has: `connect` takes a mode ("legacy", "auto" or a version to pin),
// and there are `discover`, `listen` and `unlisten`. Raw messages are seen by an `onmessage`
// that is there before the client's own, which chains onto it.

import { createInterface } from "node:readline";
import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";

// The client says things there that are not for the other end of stdout.
console.log = console.info = console.debug = console.error;

const TIMEOUT = 30_000;
const LOG_LEVEL = "io.modelcontextprotocol/logLevel";

const clients = new Map();
const cancels = new Map();

// A result schema that any result meets, so that what comes back is what was sent.
const anything = {
  "~standard": { version: 1, vendor: "interop", validate: (value) => ({ value }) },
};

function emit(line) {
  process.stdout.write(JSON.stringify(line) + "\n");
}

function makeClient(handle, mode) {
  const client = new Client(
    { name: "typescript-2", version: "1.0" },
    {
      capabilities: { sampling: {}, elicitation: {}, roots: { listChanged: true } },
      versionNegotiation: { mode: mode === "legacy" || mode === "auto" ? mode : { pin: mode } },
    },
  );
  client.setRequestHandler("elicitation/create", ({ params }) => {
    emit({ client: handle, event: "asked", message: params.message });
    return { action: "accept", content: answersTo(params) };
  });
  client.setRequestHandler("sampling/createMessage", ({ params }) => ({
    role: "assistant",
    model: "interop",
    content: { type: "text", text: `sampled ${firstText(params.messages[0].content)}` },
  }));
  client.setRequestHandler("roots/list", () => ({
    roots: [{ uri: "file:///interop", name: "interop" }],
  }));
  client.setNotificationHandler("notifications/message", ({ params }) =>
    emit({ client: handle, event: "log", data: params.data }),
  );
  client.setNotificationHandler("notifications/resources/updated", ({ params }) =>
    emit({ client: handle, event: "updated", uri: params.uri }),
  );
  client.onerror = (error) => emit({ client: handle, event: "error", text: String(error) });
  return client;
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

const operations = {
  async connect({ client: handle, url, mode, session_id, protocol_version, terminate }) {
    const transport = new StreamableHTTPClientTransport(new URL(url), {
      sessionId: session_id ?? undefined,
      protocolVersion: protocol_version ?? undefined,
      reconnectionOptions: {
        initialReconnectionDelay: 100,
        maxReconnectionDelay: 500,
        reconnectionDelayGrowFactor: 1.5,
        maxRetries: 5,
      },
    });
    transport.onmessage = (message) => emit({ client: handle, event: "message", message });
    const client = makeClient(handle, mode ?? "legacy");
    clients.set(handle, { client, transport, terminate, listening: null });
    try {
      await client.connect(transport, { timeout: TIMEOUT });
    } catch (error) {
      clients.delete(handle);
      await client.close();
      throw error;
    }
    return {
      session_id: sessionIdOf({ transport }),
      era: client.getProtocolEra() ?? null,
      version: client.getNegotiatedProtocolVersion() ?? null,
      server: client.getServerVersion() ?? null,
      capabilities: client.getServerCapabilities() ?? null,
    };
  },
  async session_id(_, entry) {
    return sessionIdOf(entry);
  },
  async discover(_, { client }) {
    return await client.discover({ timeout: TIMEOUT });
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
    const abort = new AbortController();
    cancels.set(key, abort);
    const options = {
      signal: abort.signal,
      timeout: TIMEOUT,
      onresumptiontoken: (token) => emit({ client: handle, event: "token", key, token }),
    };
    if (progress) {
      options.onprogress = (step) =>
        emit({ client: handle, event: "progress", key, progress: step.progress });
    }
    if (resume_from) options.resumptionToken = resume_from;
    const params = { name: tool, arguments: args };
    if (log_level) params._meta = { [LOG_LEVEL]: log_level };
    try {
      const result = await client.callTool(params, options);
      return {
        text: result.content[0].text,
        is_error: result.isError ?? false,
        structured: result.structuredContent ?? null,
      };
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
  async request({ method, params, key }, { client }) {
    const abort = new AbortController();
    cancels.set(key, abort);
    try {
      const options = { timeout: TIMEOUT, signal: abort.signal };
      return await client.request({ method, params }, anything, options);
    } finally {
      cancels.delete(key);
    }
  },
  async listen({ client: handle, filter }, entry) {
    const listening = await entry.client.listen(filter, { timeout: TIMEOUT });
    entry.listening = listening;
    listening.closed.then((how) => emit({ client: handle, event: "closed", how }));
    return listening.honoredFilter;
  },
  async unlisten(_, { listening }) {
    await listening.close();
    return await listening.closed;
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
  // As in typescript/driver.mjs: first let node see what else has happened by now.
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
