// The stock TypeScript 1.x client, driven as ../driving.mjs says, over Streamable HTTP or WebSocket.
//
// The WebSocket transport takes the global WebSocket: node 22 has one, node 20 (from 20.10) has it
// under --experimental-websocket.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { WebSocketClientTransport } from "@modelcontextprotocol/sdk/client/websocket.js";
import {
  CallToolResultSchema,
  CreateMessageRequestSchema,
  ElicitRequestSchema,
  ListRootsRequestSchema,
  LoggingMessageNotificationSchema,
  ResultSchema,
} from "@modelcontextprotocol/sdk/types.js";
import { answer, CAPABILITIES, drive, emit } from "../driving.mjs";

const SCHEMAS = {
  "elicitation/create": ElicitRequestSchema,
  "sampling/createMessage": CreateMessageRequestSchema,
  "roots/list": ListRootsRequestSchema,
};

drive({
  makeTransport(url, options, { protocol_version }) {
    if (url.protocol === "ws:") return new WebSocketClientTransport(url);
    const transport = new StreamableHTTPClientTransport(url, options);
    if (protocol_version) transport.setProtocolVersion(protocol_version);
    return transport;
  },
  makeClient(handle) {
    const client = new Client({ name: "typescript-1", version: "1.0" }, { capabilities: CAPABILITIES });
    answer(handle, (method, handler) => client.setRequestHandler(SCHEMAS[method], handler));
    client.setNotificationHandler(LoggingMessageNotificationSchema, ({ params }) =>
      emit({ client: handle, event: "log", data: params.data }),
    );
    return client;
  },
  callTool: (client, params, options) => client.callTool(params, CallToolResultSchema, options),
  request: (client, request, options) => client.request(request, ResultSchema, options),
});
