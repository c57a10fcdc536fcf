/** A client whose session outlives its connections (spec/client.md). One object: one server, one user (SEC6). */

import { randomUUID } from "node:crypto";
import { HandshakeLink, ModernLink, type Hearer, type Link } from "./link.js";
import { EXTENSION, HEAD, INSTANCE, isObject, Lost, outcomeUnknown, Refused, REQUEST_KEY, SESSION, type JsonObject, type Message } from "./wire.js";

/** What the client hands over. */
export interface Application {
  /** An event of the session, or a message of the connection; each once (CLI3). */
  notified(method: string, params: JsonObject): void;
  /** Events may be missing: read lists and resources again (CLI4). */
  mayHaveMissed(): void;
  /** Another client has the session now (TKO7). */
  displaced(): void;
  /** Puts a question to the user. */
  ask(params: JsonObject): Promise<JsonObject>;
}

/** What is known of the session. */
interface Known {
  sessionId: string;
  state: string | null;
  /** The last event that was processed (CUP2). */
  position: string | null;
  seen: Set<string>;
}

const BACKOFF = { base: 0.05, cap: 2 }; // seconds
const SEEN = 10_000; // more than a window holds (CLI9)
const SHARE_OF_LIFETIME = 0.9; // KEY16
const AT_ONCE = 1; // seconds: what is refused later may have begun (CLI6)

const sleep = (seconds: number): Promise<void> => new Promise((wake) => setTimeout(wake, seconds * 1000));

export class Client implements Hearer {
  private link: Link | null = null;
  private before: Link | null = null;
  private connecting: Promise<Link> | null = null;
  private session: Known | null = null;
  private readonly uris = new Set<string>();
  private readonly answers = new Map<string | number, Promise<JsonObject>>();
  private readonly instance = randomUUID(); // TKO12
  private failures = 0;
  private retryAfter = 0;
  private lifetime: number | null = null;
  private isDisplaced = false;
  private isClosed = false;

  constructor(
    private readonly url: string,
    private readonly application: Application,
    private readonly era: "handshake" | "modern" = "handshake",
  ) {}

  // --- for the application ----------------------------------------------------------------------------

  /** The result of a tool, which ran at most once. Throws `Refused`, with -31012 if nobody knows (ERR7). */
  async call(name: string, args: JsonObject): Promise<JsonObject> {
    return this.request("tools/call", { name, arguments: args });
  }

  async subscribe(...uris: string[]): Promise<void> {
    for (const uri of uris) {
      this.uris.add(uri);
      if (this.era === "handshake") await this.request("resources/subscribe", { uri });
    }
    if (this.era === "modern") await this.connected().then((link) => this.lost(link)); // A new filter is a new listen (HTM8).
  }

  /** DEL1: a session that is no longer needed is ended. */
  async close(): Promise<void> {
    this.isClosed = true;
    const { link, session } = this;
    this.link = null;
    this.before?.cut();
    if (link === null) return;
    try {
      if (session !== null && !this.isDisplaced && (await this.tryTo(link, "session/end", { sessionId: session.sessionId })) === null) {
        await link.request("sessions/delete", { _meta: this.metaFor(session, null) });
      }
      await link.leave();
    } catch {
      link.cut(); // It expires by itself.
    }
  }

  /** As if the network failed. */
  breakConnection(): void {
    const { link } = this;
    if (link === null) return;
    this.lost(link);
    link.cut();
  }

  // --- requests -------------------------------------------------------------------------------------------

  private async request(method: string, params: JsonObject): Promise<JsonObject> {
    let firstSent: number | null = null;
    let key: string | null = null;
    let sentIn: Known | null = null;
    for (;;) {
      const link = await this.connected();
      const { session } = this;
      if (firstSent === null) {
        // KEY1: a key of its own, where the server knows keys.
        key = this.lifetime === null || session === null ? null : randomUUID();
        sentIn = session;
      } else if (key === null || sentIn !== session || !this.isSurelyKnown(firstSent)) {
        throw outcomeUnknown(); // KEY16, KEY17, CLI6
      }
      const isFirst = firstSent === null;
      firstSent ??= Date.now();
      try {
        const result = await link.request(method, { ...params, _meta: this.metaFor(session, key) });
        this.failures = 0;
        this.learn(session, result);
        return result;
      } catch (error) {
        if (error instanceof Lost) {
          this.retryAfter = error.retryAfter;
          this.lost(link);
          if (error.neverBegan && isFirst) firstSent = null;
        } else if (error instanceof Refused && error.code === -32043 && session !== null) {
          this.forget(session, link);
          const mayHaveBegun = isObject(error.data) && error.data["started"] === true;
          if (mayHaveBegun || !isFirst || Date.now() - firstSent > AT_ONCE * 1000) throw outcomeUnknown(); // CLI6
          firstSent = null;
        } else throw error;
      }
    }
  }

  private metaFor(session: Known | null, key: string | null): JsonObject {
    if (session === null) return {};
    const { sessionId, state } = session;
    const meta: JsonObject = { [SESSION]: state === null ? { sessionId } : { sessionId, state } }; // STT1
    return key === null ? meta : { ...meta, [REQUEST_KEY]: key };
  }

  /** STT1, CLI7. */
  private learn(session: Known | null, result: JsonObject): void {
    const meta = isObject(result["_meta"]) ? result["_meta"][SESSION] : undefined;
    if (session === null || !isObject(meta) || meta["sessionId"] !== session.sessionId) return;
    if (typeof meta["state"] === "string") session.state = meta["state"];
  }

  /** KEY16: by the clock on the wall, since the other stands still while the machine sleeps. */
  private isSurelyKnown(firstSent: number): boolean {
    return this.lifetime !== null && Date.now() - firstSent < this.lifetime * SHARE_OF_LIFETIME * 1000;
  }

  // --- connections ------------------------------------------------------------------------------------

  /** A connection on which the session is attached, as soon as there is one. */
  private async connected(): Promise<Link> {
    if (this.link !== null) return this.link;
    this.connecting ??= this.connect().finally(() => (this.connecting = null));
    return this.connecting;
  }

  /** CLI1, CLI2. */
  private async connect(): Promise<Link> {
    for (;;) {
      if (this.isClosed) throw outcomeUnknown();
      const wait = Math.random() * Math.min(BACKOFF.cap, BACKOFF.base * 2 ** this.failures);
      if (this.failures > 0 || this.retryAfter > 0) await sleep(Math.max(wait, this.retryAfter));
      this.failures += 1;
      this.retryAfter = 0;
      const link = this.era === "modern" ? new ModernLink(this.url, this) : new HandshakeLink(this.url, this);
      try {
        await link.open();
        this.learnKeys(link.capabilities);
        if (!this.isDisplaced) await this.enter(link);
      } catch (error) {
        link.cut();
        if (error instanceof Lost) this.retryAfter = error.retryAfter;
        continue;
      }
      if (!link.isOpen) continue;
      // Answers that were on their way had their time; what is cut now is sent again here.
      this.before?.cut();
      this.before = null;
      this.link = link;
      return link;
    }
  }

  /** Of servers that advertise different lifetimes the shortest counts (KEY16). */
  private learnKeys(capabilities: JsonObject): void {
    const extensions = capabilities["extensions"];
    const settings = isObject(extensions) ? extensions[EXTENSION] : undefined;
    const keys = isObject(settings) ? settings["requestKeys"] : undefined;
    const told = isObject(keys) && typeof keys["lifetime"] === "number" ? keys["lifetime"] : null;
    this.lifetime = told === null || this.lifetime === null ? told : Math.min(told, this.lifetime);
  }

  /** Resumes the session, or starts one. */
  private async enter(link: Link): Promise<void> {
    if (this.session !== null) await this.resume(link, this.session);
    if (this.session === null) await this.start(link);
    if (this.session !== null) link.listen(this.metaFor(this.session, null), this.instance, [...this.uris]);
  }

  private async start(link: Link): Promise<void> {
    const started = (await this.tryTo(link, "session/start")) ?? (await this.create(link)); // STA6
    if (started === null) return; // Without sessions, then.
    const { sessionId, state, sessionEventId: head } = started;
    this.session = {
      sessionId: String(sessionId),
      state: typeof state === "string" ? state : null,
      position: typeof head === "string" ? head : null,
      seen: new Set(),
    };
    if (this.era === "modern") return;
    for (const uri of this.uris) await link.request("resources/subscribe", { uri, _meta: this.metaFor(this.session, null) }); // CLI4
  }

  /** What a server without a log has (SLS1); told as `session/start` tells it. No session is named (CRE2). */
  private async create(link: Link): Promise<JsonObject | null> {
    const result = await this.tryTo(link, "sessions/create");
    if (result === null || !isObject(result["session"])) return null;
    const meta = isObject(result["_meta"]) ? result["_meta"] : {};
    return { ...result["session"], sessionEventId: meta[HEAD] ?? null };
  }

  /** The result, or null if the server does not know the method. */
  private async tryTo(link: Link, method: string, params: JsonObject = {}): Promise<JsonObject | null> {
    try {
      return await link.request(method, params);
    } catch (error) {
      if (error instanceof Refused && error.code === -32601) return null;
      throw error;
    }
  }

  private async resume(link: Link, session: Known): Promise<void> {
    const { sessionId, position } = session;
    let result: JsonObject | null;
    try {
      const params = { sessionId, _meta: { [INSTANCE]: this.instance } };
      result = await this.tryTo(link, "session/resume", position === null ? params : { ...params, lastSessionEventId: position });
    } catch (error) {
      if (!(error instanceof Refused) || error.code !== -32043) throw error;
      this.session = null; // CLI5
      this.application.mayHaveMissed();
      return;
    }
    if (result === null) return; // SLS1: there is nothing to resume, and the session goes on.
    if (result["catchup"] !== false || result["reason"] === "no_stream") return; // RES12
    // CUP14, CLI4; but what has overtaken this answer is newer than the head (RES7).
    if (session.position === position) {
      session.seen.clear();
      session.position = String(result["sessionEventId"]);
    }
    this.application.mayHaveMissed();
  }

  private forget(session: Known, link: Link): void {
    if (this.session !== session) return;
    this.session = null; // CLI5
    this.application.mayHaveMissed();
    this.lost(link);
  }

  lost(link: Link): void {
    if (this.link !== link) return link.cut();
    this.link = null;
    this.before = link;
    if (!this.isClosed) this.connected().catch(() => {});
  }

  // --- what the server says ----------------------------------------------------------------------------

  hear(message: Message): void {
    const { method, params = {} } = message;
    if (method === undefined) return;
    if (message.id !== undefined) void this.answer(message.id, method, params);
    else if (method === "notifications/sessions/detached") this.detached(params);
    else if (method !== "notifications/progress") this.process(method, params);
  }

  /** CLI3, CLI8: processed first, noted then. */
  private process(method: string, params: JsonObject): void {
    const id = params["sessionEventId"];
    if (id === undefined) return this.application.notified(method, params);
    const meta = isObject(params["_meta"]) ? params["_meta"][SESSION] : undefined;
    const { session } = this;
    if (session === null || !isObject(meta) || meta["sessionId"] !== session.sessionId) return;
    this.failures = 0; // CLI2
    const name = String(id);
    if (session.seen.has(name)) return;
    this.application.notified(method, params);
    session.seen.add(name);
    if (session.seen.size > SEEN) session.seen.delete(session.seen.values().next().value!);
    session.position = name;
  }

  /** ASK5: asked once, answered each time. */
  private async answer(id: string | number, method: string, params: JsonObject): Promise<void> {
    if (this.answers.has(id) && !(await isSettled(this.answers.get(id)!))) return;
    if (method === "elicitation/create" && !this.answers.has(id)) this.answers.set(id, this.application.ask(params));
    const answer = this.answers.get(id);
    const told: Message =
      method === "ping"
        ? { jsonrpc: "2.0", id, result: {} }
        : answer === undefined
          ? { jsonrpc: "2.0", id, error: { code: -32601, message: "Method not found" } }
          : { jsonrpc: "2.0", id, result: await answer };
    try {
      await (await this.connected()).notify(told);
    } catch {
      // The server asks again where it can hear the answer (ASK2).
    }
  }

  private detached(params: JsonObject): void {
    const { link, session } = this;
    if (session === null || params["sessionId"] !== session.sessionId) return;
    switch (params["reason"]) {
      case "taken_over":
        if (params["instance"] === this.instance) break; // TKO13
        this.isDisplaced = true; // TKO7
        this.application.displaced();
        return;
      case "draining":
        this.retryAfter = Math.random() * Number(params["retryAfter"] ?? 1); // TKO11
        break;
      default: // evicted: resume from our own position
    }
    if (link !== null) this.lost(link);
  }
}

const isSettled = async (answer: Promise<unknown>): Promise<boolean> =>
  Promise.race([answer.then(() => true), Promise.resolve().then(() => Promise.resolve(false))]);
