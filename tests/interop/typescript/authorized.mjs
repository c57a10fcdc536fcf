// `authorized.mjs URL USER`: see ../authorizing.mjs; with the TypeScript 1.x client.

import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StreamableHTTPClientTransport } from "@modelcontextprotocol/sdk/client/streamableHttp.js";
import { authorize } from "../authorizing.mjs";

const [url, user] = process.argv.slice(2);
await authorize(
  url,
  user,
  () => new Client({ name: "typescript-1", version: "1.0" }),
  (at, options) => new StreamableHTTPClientTransport(at, options),
);
