/**
 * `node build/client/demo.js URL [modern]`: subscribes, loses its connection, comes back, and prints what it heard: each change once.
 * The server needs the fixture tools of conformance/README.md.
 */

import { Client, type Application } from "./client.js";
import type { JsonObject } from "./wire.js";

const URI = `conformance://resource/${Date.now()}`;
const heard: string[] = [];
let missed = 0;
let wake = (): void => {};

const quiet: Application = {
  notified: () => {},
  mayHaveMissed: () => {},
  displaced: () => {},
  ask: async (): Promise<JsonObject> => ({ action: "decline" }),
};
const listening: Application = {
  ...quiet,
  notified: (method, params) => {
    if (method === "notifications/message") heard.push(String(params["data"]));
    wake();
  },
  mayHaveMissed: () => (missed += 1),
};

const url = process.argv[2] ?? "";
const era = process.argv[3] === "modern" ? "modern" : "handshake";
const client = new Client(url, listening, era);
await client.subscribe(URI);
await client.call("say", { texts: ["one", "two"] });
await until(2);
// Cut before the answer: it is sent again under its key and ran once, and its events come with the replay.
const saying = client.call("say", { texts: ["three", "four"] });
setImmediate(() => client.breakConnection());
await saying;
client.breakConnection();
await client.call("say", { texts: ["five"] });
await until(5);
await client.close();
console.log(JSON.stringify({ heard, missed }));
process.exit(0);

async function until(count: number): Promise<void> {
  while (heard.length < count) await new Promise<void>((resolve) => (wake = resolve));
}
