// Drives the stock TypeScript client over WebSocket: the language of driver.mjs, and of it
// what a WebSocket client is asked to do.
//
// The transport takes the global WebSocket: node 22 has one, node 20 (from 20.10) has it
// under --experimental-websocket.

import { createInterface } from "node:readline";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { WebSocketClientTransport } from "@modelcontextprotocol/sdk/client/websocket.js";

const clients = new Map();

function emit(line) {
  process.stdout.write(JSON.stringify(line) + "\n");
}

const operations = {
  async connect({ client: handle, url }) {
    const transport = new WebSocketClientTransport(new URL(url));
    // The client chains onto a handler that is already there, so this sees raw messages.
    transport.onmessage = (message) => emit({ client: handle, event: "message", message });
    const client = new Client({ name: "typescript-1", version: "1.0" }, { capabilities: {} });
    client.onerror = (error) => emit({ client: handle, event: "error", text: String(error) });
    const closed = new Promise((resolve) => (client.onclose = resolve));
    clients.set(handle, { client, closed });
    await client.connect(transport);
    return { session_id: transport.sessionId ?? null };
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
  async call({ client: handle, tool, arguments: args, key, progress }, { client }) {
    const options = { timeout: 30_000 };
    if (progress) {
      options.onprogress = (step) =>
        emit({ client: handle, event: "progress", key, progress: step.progress });
    }
    const result = await client.callTool({ name: tool, arguments: args }, undefined, options);
    return { text: result.content[0].text, is_error: result.isError ?? false };
  },
  async read({ uri }, { client }) {
    return (await client.readResource({ uri })).contents[0].text;
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
  async close({ client: handle }, { client, closed }) {
    clients.delete(handle);
    await client.close();
    await closed;
    return {};
  },
};

async function run(command) {
  try {
    const result = await operations[command.op](command, clients.get(command.client));
    emit({ id: command.id, result: result ?? null });
  } catch (error) {
    const { code = null, message, data = null, stack } = error;
    emit({ id: command.id, error: { code, message: message ?? String(error), data, stack } });
  }
}

if (typeof WebSocket === "undefined") {
  throw new Error("the TypeScript client needs a global WebSocket: node 20.10 or newer");
}
createInterface({ input: process.stdin })
  .on("line", (line) => run(JSON.parse(line)))
  .on("close", () => process.exit(0));
emit({ event: "ready" });
