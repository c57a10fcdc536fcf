// `authorized.mjs URL USER MODE`: see ../authorizing.mjs; with the TypeScript v2 client.

import { Client, StreamableHTTPClientTransport } from "@modelcontextprotocol/client";
import { authorize } from "../authorizing.mjs";

const [url, user, mode] = process.argv.slice(2);
await authorize(
  url,
  user,
  () =>
    new Client(
      { name: "typescript-2", version: "1.0" },
      { versionNegotiation: { mode: mode === "legacy" ? mode : { pin: mode } } },
    ),
  (at, options) => new StreamableHTTPClientTransport(at, options),
);
