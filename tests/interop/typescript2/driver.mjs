// The stock TypeScript v2 client, driven as ../driving.mjs says.
//
// What only this client has: `connect` takes a mode ("legacy", "auto" or a version to pin),
// and there are `discover`, `listen` and `unlisten`.

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { answer, CAPABILITIES, drive, emit, TIMEOUT } from "../driving.mjs";

// The client says things there that are not for the other end of stdout.
console.log = console.info = console.debug = console.error;

// A result schema that any result meets, so that what comes back is what was sent.
const anything = {
  "~standard": { version: 1, vendor: "interop", validate: (value) => ({ value }) },
};

drive({
  makeTransport(url, options, { protocol_version }) {
    return new StreamableHTTPClientTransport(url, {
      ...options,
      protocolVersion: protocol_version ?? undefined,
    });
  },
  makeClient(handle, { mode = "legacy" }) {
    const client = new Client(
      { name: "typescript-2", version: "1.0" },
      {
        capabilities: CAPABILITIES,
        versionNegotiation: { mode: mode === "legacy" || mode === "auto" ? mode : { pin: mode } },
      },
    );
    answer(handle, (method, handler) => client.setRequestHandler(method, handler));
    client.setNotificationHandler("notifications/message", ({ params }) =>
      emit({ client: handle, event: "log", data: params.data }),
    );
    client.setNotificationHandler("notifications/resources/updated", ({ params }) =>
      emit({ client: handle, event: "updated", uri: params.uri }),
    );
    return client;
  },
  callTool: (client, params, options) => client.callTool(params, options),
  request: (client, request, options) => client.request(request, anything, options),
  opened: (client) => ({
    era: client.getProtocolEra() ?? null,
    version: client.getNegotiatedProtocolVersion() ?? null,
    server: client.getServerVersion() ?? null,
    capabilities: client.getServerCapabilities() ?? null,
  }),
  more: {
    async discover(_, { client }) {
      return await client.discover({ timeout: TIMEOUT });
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
  },
});
