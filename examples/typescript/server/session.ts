/** One protocol-mode session: what belongs to it, when it is over, and its state token. */

import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import type { Connection } from "./connection.js";
import type { Credential } from "./credentials.js";
import { KeyStore } from "./keys.js";
import { LIMITS } from "./limits.js";
import type { Listen } from "./listen.js";
import { coalescingKey, EventLog } from "./log.js";
import type { Run } from "./run.js";
import { invalidState, SESSION, type Json, type JsonObject, type Notification } from "./wire.js";

const SECRET = randomBytes(32);

/** SES4: 256 bits, in visible ASCII. */
export const newSessionId = (): string => randomBytes(32).toString("base64url");

export class Session {
  readonly log = new EventLog();
  readonly keys = new KeyStore();
  readonly runs = new Set<Run>();
  subscriptions = new Set<string>();
  /** The methods of the lists that a listen asked for; null before any listen: all (EVT1, HTM8). */
  lists: Set<string> | null = null;
  /** RES3: one at most. `cursor` is the newest event that was handed over. */
  attachment: { connection: Connection; cursor: number } | null = null;
  /** Who was the last to have it attached: on any other connection it was taken over (TKO5). */
  holder: Connection | null = null;
  /** Where the next listen begins, if something was left waiting for it (HTM1, HTM6). */
  waiting: number | null = null;
  listen: Listen | null = null;
  isEnded = false;
  private readonly made = Date.now();
  private lastUse = Date.now();
  protected values = new Map<string, Json>();
  private version = 0;

  constructor(
    readonly credential: Credential,
    readonly id = newSessionId(),
  ) {}

  /** SES13 to SES15: the idle time counts from the end of the last request. */
  isOver(now: number): boolean {
    if (this.isEnded || now >= this.made + LIMITS.lifetime * 1000) return true;
    return this.runs.size === 0 && now >= this.lastUse + LIMITS.idle * 1000;
  }

  touch(): void {
    this.lastUse = Date.now();
  }

  get head(): string {
    return this.log.idOf(this.log.head);
  }

  /** SES16: whole seconds, rounded down, so never later than the truth. */
  get expiresAt(): string {
    const ends = Math.min(this.lastUse + LIMITS.idle * 1000, this.made + LIMITS.lifetime * 1000);
    return new Date(ends).toISOString().replace(/\.[0-9]+Z$/, "Z");
  }

  /** What a result says of the session (ASC12). */
  get metadata(): JsonObject {
    return { sessionId: this.id, expiresAt: this.expiresAt, state: this.token };
  }

  /** Stores an event before anything of it is sent (EVT10). */
  store(message: Notification): void {
    const meta = { [SESSION]: { sessionId: this.id } }; // EVT6: never with state
    this.log.append(coalescingKey(message), Date.now(), (sessionEventId) => ({
      ...message,
      params: { ...message.params, _meta: meta, sessionEventId },
    }));
    this.attachment?.connection.pump(this);
  }

  // --- state (STT) ---------------------------------------------------------------------------------

  get(key: string): Json | undefined {
    return this.values.get(key);
  }

  /** STT11, STT12: key by key, and a new token only if something changed. */
  apply(changes: ReadonlyMap<string, Json>): void {
    for (const [key, value] of changes) {
      if (JSON.stringify(this.values.get(key)) === JSON.stringify(value)) continue;
      this.values.set(key, value);
      this.version += 1;
    }
  }

  /** The stored state is the state (STT7), so the token holds only which version of it the client has seen. */
  get token(): string {
    return `${this.version}.${this.seal(String(this.version))}`;
  }

  /** STT6, STT8, STT10. */
  check(state: Json | undefined): void {
    if (state === undefined || state === null) return;
    const parts = typeof state === "string" && state.length <= 4096 ? /^([0-9]{1,15})\.([\w-]{43})$/.exec(state) : null;
    if (parts === null) throw invalidState();
    if (!timingSafeEqual(Buffer.from(parts[2]!), Buffer.from(this.seal(parts[1]!)))) throw invalidState();
  }

  private seal(version: string): string {
    const bound = JSON.stringify([this.id, this.credential.principal, version]);
    return createHmac("sha256", SECRET).update(bound).digest("base64url");
  }
}
