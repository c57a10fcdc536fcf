// Runs in a page: the stock TypeScript clients call a server of another origin, and what they read
// is posted to the page's own server.

import { Client as Client2, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { Client as Client1 } from "@modelcontextprotocol/sdk/client/index.js";
import { WebSocketClientTransport } from "@modelcontextprotocol/sdk/client/websocket.js";

const CHANGED = "notifications/resources/updated";
const named = { name: "page", version: "1" };

const say = async (client, text) =>
  (await client.callTool({ name: "echo", arguments: { text } })).content[0].text;

async function overHttp(url, mode) {
  const transport = new StreamableHTTPClientTransport(new URL(url));
  const versionNegotiation = { mode: mode === "legacy" ? mode : { pin: mode } };
  const client = new Client2(named, { versionNegotiation });
  const changed = new Promise((resolve) =>
    client.setNotificationHandler(CHANGED, ({ params }) => resolve(params.uri)),
  );
  await client.connect(transport, { timeout: 20_000 });
  const read = {
    version: client.getNegotiatedProtocolVersion(),
    hasSession: transport.sessionId !== undefined,
    echo: await say(client, mode),
  };
  if (mode === "legacy") {
    // On the stream that the client opened by GET.
    await client.callTool({ name: "touch", arguments: {} });
    read.changed = await changed;
    await transport.terminateSession();
  }
  await client.close();
  return read;
}

async function overWebSocket(url) {
  const transport = new WebSocketClientTransport(new URL(url.replace(/^http/, "ws")));
  const client = new Client1(named, { capabilities: {} });
  await client.connect(transport);
  const read = { echo: await say(client, "websocket") };
  await client.close();
  return read;
}

async function run(work) {
  try {
    return await work();
  } catch (error) {
    return { failed: `${error.name}: ${error.message}` };
  }
}

const url = new URLSearchParams(location.search).get("server");
const result = {
  legacy: await run(() => overHttp(url, "legacy")),
  modern: await run(() => overHttp(url, "2026-07-28")),
  websocket: await run(() => overWebSocket(url)),
};
await fetch("/result", { method: "POST", body: JSON.stringify(result) });
