/** What a WebSocket and a pipe have in common: a connection that carries everything both ways (WSS10 to WSS14). */

import { Connection } from "./connection.js";
import type { Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import { withSubscription, type Filter, type Listening } from "./listen.js";
import { isSessionMethod } from "./methods.js";
import type { Era, Reply } from "./run.js";
import type { Service } from "./service.js";
import type { Session } from "./session.js";
import {
  answer, CLIENT_CAPABILITIES, invalidParams, invalidRequest, isObject, isRequest, isResponse, metaOf, parse, PROTOCOL_VERSION, SESSION,
  type Message, type Notification, type Request, type RequestId, type Response,
} from "./wire.js";

/** How the bytes go. */
export interface Wire {
  send(text: string): void;
  /** Bytes that wait to be taken. */
  readonly waiting: number;
  /** The peer took nothing for too long, or there is a hole (ATT7, ATT10). */
  cut(): void;
}

export class Duplex extends Connection implements Listening {
  readonly pushable = true;
  override readonly isOneWire = true;
  readonly listens = new Map<RequestId, { filter: Filter; session: Session | null }>();
  isClosed = false;
  private firstWasModern = false;
  private hadRequest = false;
  private readonly closers = new Set<() => void>();
  private readonly timer: NodeJS.Timeout;

  constructor(
    credential: Credential,
    private readonly service: Service,
    private readonly wire: Wire,
  ) {
    super(credential);
    service.registry.connections.add(this);
    this.timer = this.watch();
  }

  // --- what goes out ---------------------------------------------------------------------------------

  override push(message: Message): void {
    if (!this.isClosed) this.wire.send(JSON.stringify(message));
  }

  /** WSS11: as they come, and from the log as soon as a slow peer takes again (ATT7). */
  override pump(session: Session): void {
    const attachment = session.attachment!;
    while (!this.isClosed && this.wire.waiting <= LIMITS.bufferBytes) {
      const events = session.log.after(attachment.cursor, Date.now());
      if (events === null) return this.wire.cut(); // ATT10
      const next = events[0];
      if (next === undefined) return;
      attachment.cursor = next.number;
      const listens = session.listen !== null && this.listens.has(session.listen.id);
      this.push(listens ? withSubscription(next.message, session.listen!.id) : next.message); // WSS12
    }
  }

  override takeBack(): void {}

  override hear(message: Notification): void {
    super.hear(message);
    const isUpdate = message.method === "notifications/resources/updated";
    for (const [id, { filter, session }] of this.listens) {
      if (session !== null) continue;
      const isHeard = isUpdate
        ? filter.uris.has(message.params?.["uri"] as string)
        : filter.lists.has(message.method) && this.attached.size === 0; // EVT11
      if (isHeard) this.push(withSubscription(message, id));
    }
  }

  private watch(): NodeJS.Timeout {
    let left = 0;
    let since = Date.now();
    return setInterval(() => {
      const now = this.wire.waiting;
      if (now <= LIMITS.bufferBytes || now < left) since = Date.now();
      left = now;
      if (Date.now() - since > LIMITS.slow * 1000) return this.wire.cut();
      for (const session of this.attached) this.pump(session);
    }, 100).unref();
  }

  // --- what comes in ---------------------------------------------------------------------------------

  receive(text: string): void {
    const parsed = parse(text);
    if ("refusal" in parsed) return this.push(parsed.refusal); // WSS14
    const { message } = parsed;
    const caller = { connection: this, credential: this.credential, era: this.eraOf(message) };
    if (isResponse(message)) return this.service.take(message, this.credential);
    if (!isRequest(message)) return this.service.notice(message, caller);
    const refusal = this.refusalOf(message, caller.era);
    if (refusal !== null) return this.push(answer(message.id, refusal.outcome));
    if (caller.era === "modern") this.declare(metaOf(message.params)[CLIENT_CAPABILITIES]);
    this.service.serve(message, caller, new DuplexReply(this));
  }

  /** WSS10: there is no header that could say it. */
  private eraOf(message: Message): Era {
    const isModern = !isResponse(message) && typeof metaOf(message.params)[PROTOCOL_VERSION] === "string";
    return isModern ? "modern" : "handshake";
  }

  private refusalOf(request: Request, era: Era) {
    if (!this.hadRequest) this.firstWasModern = era === "modern";
    this.hadRequest = true;
    const isFree =
      era === "modern" || this.handshake || isSessionMethod(request.method) || isObject(metaOf(request.params)[SESSION]) || request.method === "initialize"; // ASC9
    if (isFree) return null;
    if (this.firstWasModern) return invalidParams("the envelope is missing");
    return request.method === "ping" ? null : invalidRequest("initialize comes first"); // WSS20
  }

  /** ATT9, REQ4: the sessions live on, and so does what runs. */
  close(): void {
    if (this.isClosed) return;
    this.isClosed = true;
    clearInterval(this.timer);
    this.service.registry.close(this);
    for (const then of [...this.closers]) then();
  }

  whenClosed(then: () => void): () => void {
    this.closers.add(then);
    return () => this.closers.delete(then);
  }
}

/** WSS13: an answer goes out in the moment in which it is decided, as everything does. */
class DuplexReply implements Reply {
  private forget: (() => void)[] = [];

  constructor(private readonly connection: Duplex) {}

  get isClosed(): boolean {
    return this.connection.isClosed;
  }

  begin(): void {}

  send(message: Message): void {
    this.connection.push(message);
  }

  answer(message: Response): void {
    this.forget.forEach((forget) => forget());
    this.connection.push(message);
  }

  onClose(then: () => void): void {
    this.forget.push(this.connection.whenClosed(then));
  }
}
