/** The response to one POST of a connection, as a stream that can be continued (HTL10). */

import type { Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import type { Reply } from "./run.js";
import type { Sse } from "./sse.js";
import { byteLength, type Message, type Response } from "./wire.js";

export class ResponseStream implements Reply {
  isFinished = false;
  private sse: Sse | null = null;
  private messages: Message[] = [];
  private bytes = 0;
  private readonly closers: (() => void)[] = [];

  constructor(
    private readonly idOf: (place: number) => string,
    readonly credential: Credential,
    private readonly primes: boolean,
    private readonly whenFinished: () => void,
  ) {}

  get isClosed(): boolean {
    return this.sse === null || this.sse.isClosed;
  }

  begin(): void {}

  canContinue(place: number): boolean {
    return place <= this.messages.length && this.bytes <= LIMITS.responseStreamBytes;
  }

  /** Sends on this response what follows `place`. */
  open(sse: Sse, place: number): void {
    this.sse?.end();
    this.sse = sse;
    sse.onClose(() => this.sse === sse && !this.isFinished && this.closers.forEach((then) => then()));
    if (this.primes) sse.write(null, this.idOf(place));
    this.messages.slice(place).forEach((message, index) => sse.write(message, this.idOf(place + index + 1)));
    if (this.isFinished) sse.end();
  }

  send(message: Message): void {
    if (this.isFinished) return;
    this.bytes += byteLength(message);
    // ERR6: what is too large to keep cannot be continued.
    if (this.bytes > LIMITS.responseStreamBytes && this.isClosed) return;
    this.messages.push(message);
    this.sse?.write(message, this.idOf(this.messages.length));
  }

  answer(message: Response): void {
    this.send(message);
    this.isFinished = true;
    this.sse?.end();
    this.whenFinished();
  }

  close(): void {
    this.sse?.end();
  }

  onClose(then: () => void): void {
    this.closers.push(then);
  }
}
