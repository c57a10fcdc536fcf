/**
 * The example server. `node build/server/main.js [PORT]` serves HTTP and WebSocket on loopback and prints its URL;
 * with `--stdio` it also serves its standard input and output, and prints nothing.
 */

import type { AddressInfo } from "node:net";
import { isBeside } from "./beside.js";
import { Tokens } from "./credentials.js";
import { PATH, serveHttp } from "./http.js";
import { Service } from "./service.js";
import { serveStdio } from "./stdio.js";
import { serveWebSocket } from "./websocket.js";

const service = new Service();
const tokens = new Tokens(process.env["TOKENS"]);
const isPiped = process.argv.includes("--stdio");
const port = process.argv.slice(2).find((argument) => argument !== "--stdio");

if (isPiped) serveStdio(service);
if (!isPiped || port !== undefined) {
  const http = serveHttp(service, tokens);
  serveWebSocket(http, service, tokens);
  http.listen(Number(port ?? 0), "127.0.0.1", () => {
    const { port: chosen } = http.address() as AddressInfo;
    if (!isPiped) console.log(`http://127.0.0.1:${chosen}${PATH}`);
  });
}
if (isBeside) process.stdin.on("end", () => process.exit(0)).resume();
process.on("SIGTERM", () => void service.drain().then(() => setTimeout(() => process.exit(0), 200)));
