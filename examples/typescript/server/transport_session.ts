/** A transport-mode session: the connection of the handshake era over HTTP, with its GET stream (HTL). */

import { randomBytes } from "node:crypto";
import type { ServerResponse } from "node:http";
import { Connection, detach, displace } from "./connection.js";
import { covers, type Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import { ResponseStream } from "./response_stream.js";
import { newSessionId, type Session } from "./session.js";
import { Sse } from "./sse.js";
import { answer, byteLength, notification, outcomeUnknown, type Message, type RequestId } from "./wire.js";

/** A message that is on the GET stream, or waits for it. */
interface Entry {
  number: number;
  message: Message;
  /** Whose event it is; null: a message of the connection itself. */
  session: Session | null;
  bytes: number;
  at: number;
}

const LISTS = ["tools", "prompts", "resources"];

export class TransportSession extends Connection {
  readonly id = newSessionId();
  readonly pushable = true;
  // What tells this connection's SSE ids from those of others; the session id itself is a secret.
  private readonly tag = randomBytes(9).toString("base64url");
  private entries: Entry[] = [];
  private last = 0;
  /** The newest entry that was dropped, and the newest that a stream was handed. */
  private floor = 0;
  private handed = 0;
  private stream: { sse: Sse; cursor: number } | null = null;
  private hadStream = false;
  private readonly responses = new Map<number, ResponseStream>();
  private streamsMade = 0;
  private lastUse = Date.now();

  touch(): void {
    this.lastUse = Date.now();
  }

  isOver(now: number): boolean {
    return this.stream === null && this.openRequests === 0 && now >= this.lastUse + LIMITS.idle * 1000;
  }

  /** SEC3: what a GET stream of this credential may carry. */
  mayHear(credential: Credential): boolean {
    return covers(credential, this.credential) && [...this.attached].every((session) => covers(credential, session.credential));
  }

  override push(message: Message): void {
    this.add(message, null);
  }

  /** HTL3. */
  override pump(session: Session): void {
    const attachment = session.attachment!;
    for (const event of session.log.after(attachment.cursor, Date.now()) ?? []) {
      attachment.cursor = event.number;
      this.add(event.message, session);
    }
  }

  /** TKO1: also what waits for a client that comes back. Their ids stay valid positions. */
  override takeBack(session: Session): void {
    this.entries = this.entries.filter((entry) => entry.session !== session);
  }

  private add(message: Message, session: Session | null): void {
    this.last += 1;
    this.entries.push({ number: this.last, message, session, bytes: byteLength(message), at: Date.now() });
    this.flow();
    this.trim(session);
  }

  /** What waits is bounded as the window of its session is (HTL3, ATT7). */
  private trim(session: Session | null): void {
    const old = Date.now() - LIMITS.windowAge * 1000;
    const own = this.entries.filter((entry) => entry.session === session);
    let bytes = own.reduce((sum, entry) => sum + entry.bytes, 0);
    while (own.length > 0) {
      const isOver = own.length > 1 && (own.length > LIMITS.windowEvents || bytes > LIMITS.windowBytes);
      if (!isOver && own[0]!.at >= old) return;
      const oldest = own.shift()!;
      bytes -= oldest.bytes;
      this.floor = Math.max(this.floor, oldest.number);
      this.entries = this.entries.filter((entry) => entry !== oldest);
    }
  }

  private sseId(number: number): string {
    return `${this.tag}.g.${number}`;
  }

  private flow(): void {
    const { stream } = this;
    if (stream === null) return;
    while (!stream.sse.isFull) {
      const next = this.entries.find((entry) => entry.number > stream.cursor);
      if (next === undefined) return;
      if (stream.cursor < this.floor) return stream.sse.end(); // ATT10
      stream.cursor = next.number;
      this.handed = Math.max(this.handed, next.number);
      stream.sse.write(next.message, this.sseId(next.number));
    }
  }

  // --- GET -------------------------------------------------------------------------------------------

  /** Opens a GET stream, or continues a response stream. False: the credential is too weak for it (SEC3). */
  openStream(response: ServerResponse, lastEventId: string | undefined, credential: Credential): boolean {
    const ofResponse = /^([\w-]+)\.r\.([0-9]+)\.([0-9]+)\.([\w-]+)$/.exec(lastEventId ?? "");
    if (ofResponse !== null) return this.continueResponse(response, ofResponse, credential);
    const isFirst = !this.hadStream;
    this.hadStream = true;
    this.trim(null);
    for (const session of this.attached) this.trim(session);
    let cursor = this.handed;
    if (lastEventId !== undefined) {
      const [tag, kind, number] = lastEventId.split(".");
      cursor = tag === this.tag && kind === "g" && /^[0-9]{1,15}$/.test(number ?? "") ? Number(number) : -1; // HTL4
    } else if (!isFirst) {
      for (const session of [...this.attached]) detach(session); // HTL7
    }
    this.stream?.sse.end(); // HTL8
    const sse = new Sse(response, credential);
    const stream = { sse, cursor };
    this.stream = null;
    sse.onClose(() => {
      if (this.stream === stream) this.stream = null;
      this.touch();
    });
    sse.onDrain(() => this.flow());
    if (cursor < this.floor || cursor > this.last) this.sayWhatWasLost(stream);
    else if (this.primes) sse.write(null, this.sseId(cursor));
    this.stream = stream;
    this.flow();
    return true;
  }

  /** HTL9. What waited is not sent (HTL9): the opening messages stand for it. */
  private sayWhatWasLost(stream: { sse: Sse; cursor: number }): void {
    this.floor = this.handed = stream.cursor = this.last;
    for (const session of [...this.attached]) displace(session, "evicted");
    const opening = [
      ...[...this.subscriptions].map((uri) => notification("notifications/resources/updated", { uri })),
      ...LISTS.map((list) => notification(`notifications/${list}/list_changed`)),
    ];
    const last = opening.pop()!;
    for (const message of opening) stream.sse.write(message);
    stream.sse.write(last, this.sseId(stream.cursor));
  }

  get primes(): boolean {
    return this.version >= "2025-11-25"; // HTL12
  }

  // --- response streams ------------------------------------------------------------------------------

  /** HTL10: the response to a POST, which outlives its HTTP response. */
  newResponse(requestId: RequestId, sse: Sse, credential: Credential): ResponseStream {
    const number = (this.streamsMade += 1);
    const encoded = Buffer.from(JSON.stringify(requestId)).toString("base64url");
    const stream = new ResponseStream((place) => `${this.tag}.r.${number}.${place}.${encoded}`, credential, this.primes, () => {
      const finished = [...this.responses].filter(([, kept]) => kept.isFinished);
      for (const [old] of finished.slice(0, -LIMITS.responseStreams)) this.responses.delete(old);
    });
    this.responses.set(number, stream);
    stream.open(sse, 0);
    return stream;
  }

  private continueResponse(response: ServerResponse, parts: RegExpExecArray, credential: Credential): boolean {
    const [, tag, number, place, encoded] = parts;
    const stream = tag === this.tag ? this.responses.get(Number(number)) : undefined;
    if (stream !== undefined && !covers(credential, stream.credential)) return false; // SEC3
    const sse = new Sse(response, credential);
    if (stream?.canContinue(Number(place))) {
      stream.open(sse, Number(place));
      return true;
    }
    // HTL11
    sse.write(answer(requestIdOf(encoded!), outcomeUnknown().outcome));
    sse.end();
    return true;
  }

  end(): void {
    this.stream?.sse.end();
    for (const stream of this.responses.values()) stream.close();
  }
}

function requestIdOf(encoded: string): RequestId | null {
  try {
    const id: unknown = JSON.parse(Buffer.from(encoded, "base64url").toString());
    return typeof id === "string" || typeof id === "number" ? id : null;
  } catch {
    return null;
  }
}
