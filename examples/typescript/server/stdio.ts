/** stdio: one message per line, and nothing else on standard output (STD). */

import { Tokens } from "./credentials.js";
import { Duplex } from "./duplex.js";
import { LIMITS } from "./limits.js";
import type { Service } from "./service.js";
import { answer, invalidRequest } from "./wire.js";

const LINE_FEED = 10;

export function serveStdio(service: Service): void {
  const nobody = new Tokens(undefined).of(undefined)!; // STD2
  const connection = new Duplex(nobody, service, {
    send: (text) => void process.stdout.write(`${text}\n`),
    get waiting() {
      return process.stdout.writableLength;
    },
    cut: () => process.exit(1),
  });
  let parts: Buffer[] = [];
  let size = 0;

  /** STD3: a line over the limit is read to its end, dropped and answered. */
  const take = (part: Buffer, isEnd: boolean): void => {
    size += part.length;
    if (size <= LIMITS.messageBytes) parts.push(part);
    if (!isEnd) return;
    const line = Buffer.concat(parts).toString();
    if (size > LIMITS.messageBytes) connection.push(answer(null, invalidRequest("the line is too long").outcome));
    else if (line.trim() !== "") connection.receive(line);
    parts = [];
    size = 0;
  };
  process.stdin.on("data", (data: Buffer) => {
    let from = 0;
    for (let at = data.indexOf(LINE_FEED); at >= 0; at = data.indexOf(LINE_FEED, from)) {
      take(data.subarray(from, at), true);
      from = at + 1;
    }
    take(data.subarray(from), false);
  });
  process.stdout.on("error", () => process.exit(0)); // Nobody reads any more.
  process.stdin.on("end", () => void service.drain().then(() => process.exit(0))); // STD4
}
