/** A response that is a stream of server-sent events, with a bound on what waits in it (ATT7). */

import type { ServerResponse } from "node:http";
import type { Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import type { Message } from "./wire.js";

export class Sse {
  isClosed = false;
  private readonly timers: NodeJS.Timeout[] = [];

  constructor(private readonly response: ServerResponse, credential: Credential, headers: Record<string, string> = {}) {
    response.writeHead(200, { "Content-Type": "text/event-stream", "Cache-Control": "no-cache, no-transform", ...headers });
    response.flushHeaders();
    response.on("close", () => this.closed());
    // SEC4: before another event is sent.
    if (credential.expires !== Infinity) this.timers.push(setTimeout(() => this.end(), credential.expires - Date.now()));
    this.watch();
  }

  /** Without a message it is a priming event (HTL12). */
  write(message: Message | null, id?: string): void {
    if (this.isClosed) return;
    const lines = id === undefined ? "" : `id: ${id}\n`;
    const data = message === null ? "retry: 1000\ndata:" : `event: message\ndata: ${JSON.stringify(message)}`;
    this.response.write(`${lines}${data}\n\n`);
  }

  end(): void {
    this.closed();
    this.response.end();
  }

  cut(): void {
    this.response.destroy();
  }

  get isFull(): boolean {
    return this.response.writableLength > LIMITS.bufferBytes;
  }

  onDrain(then: () => void): void {
    this.response.on("drain", then);
  }

  onClose(then: () => void): void {
    this.response.on("close", then);
  }

  private closed(): void {
    this.isClosed = true;
    this.timers.forEach(clearInterval);
  }

  private watch(): void {
    let left = 0;
    let since = Date.now();
    this.timers.push(
      setInterval(() => {
        const queued = (this.response.socket as { _handle?: { writeQueueSize?: number } } | null)?._handle?.writeQueueSize ?? 0;
        const now = this.response.writableLength + queued;
        // A peer that takes anything gets its time anew.
        if (!this.isFull || now < left) since = Date.now();
        left = now;
        if (Date.now() - since > LIMITS.slow * 1000) this.cut();
      }, 500).unref(),
    );
  }
}
