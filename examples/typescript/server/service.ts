/** Which session a request belongs to, what refuses it, and what runs (ASC; the order is ASC20's). */

import { attach, type Connection } from "./connection.js";
import { covers, type Credential } from "./credentials.js";
import { callCore, isGated } from "./core.js";
import { IS_STATELESS, LIMITS } from "./limits.js";
import { serveListen } from "./listen.js";
import { callSessionMethod, isSessionMethod } from "./methods.js";
import { Registry } from "./registry.js";
import { Run, type Era, type Reply, type Sender } from "./run.js";
import type { Session } from "./session.js";
import {
  answer, cancelled, draining, invalidParams, invalidRequest, isObject, limitReached, metaOf, modeConflict, outcomeUnknown,
  REQUEST_KEY, RpcError, SERVER_INFO, SESSION, sessionDetached, sessionNotFound, sessionRequired,
  type Json, type JsonObject, type Notification, type Outcome, type Request, type Response,
} from "./wire.js";

export const INFO = { name: "example-typescript-server", version: "0.1" };

export interface Caller {
  connection: Connection;
  credential: Credential;
  era: Era;
}

/** How a request names its session: by rule 1 an id, by ASC4 `null`, or not at all. */
type Named = { sessionId: string; state: JsonObject[string] | undefined } | null | undefined;

export function namedSession(params: JsonObject | undefined): Named {
  const named = metaOf(params)[SESSION];
  if (named === undefined || named === null) return named;
  if (!isObject(named) || typeof named["sessionId"] !== "string") throw invalidParams("session metadata"); // ASC10
  return { sessionId: named["sessionId"], state: named["state"] };
}

export class Service {
  readonly registry = new Registry();
  isDraining = false;
  private readonly runs = new Set<Run>();
  private readonly drained: (() => void)[] = [];
  private readonly unheard = new Set<Run>();

  /** Serves a request; every refusal is an answer. */
  serve(request: Request, caller: Caller, reply: Reply): void {
    try {
      if (this.isDraining) throw draining();
      const key = this.keyOf(request); // KEY15
      this.checkId(request, caller); // REQ2
      if (isSessionMethod(request.method)) callSessionMethod(this, request, caller, reply);
      else this.serveIn(this.sessionOf(request, caller), IS_STATELESS ? null : key, request, caller, reply);
    } catch (error) {
      reply.answer(answer(request.id, this.asOutcome(error)));
    }
  }

  asOutcome(error: unknown): Outcome {
    if (error instanceof RpcError) return error.outcome;
    console.error(error);
    return new RpcError(-32603, "Internal error").outcome;
  }

  /** Rules 1 to 3 (ASC1, ASC2, ASC4, ASC17, TKO5). */
  private sessionOf(request: Request, caller: Caller): { session: Session | null; isNamed: boolean } {
    const { connection, credential, era } = caller;
    const named = namedSession(request.params);
    const current = era === "handshake" ? connection.current : null;
    const isThere = current !== null && this.registry.find(current.id, credential) !== null;
    if (named === null) {
      if (current !== null && (!isThere || current.holder !== connection)) connection.current = null; // ASC4
      return { session: null, isNamed: false };
    }
    if (named !== undefined) {
      const session = this.named(named.sessionId, named.state, credential);
      return { session, isNamed: true };
    }
    const passes = request.method === "ping" || request.method === "initialize"; // ASC17, TKO6
    if (current === null) return { session: null, isNamed: false };
    if (!isThere || current.holder !== connection) {
      if (passes) return { session: null, isNamed: false };
      throw isThere ? sessionDetached() : sessionNotFound(current.id);
    }
    return { session: current, isNamed: false };
  }

  /** The caller's session of that id (ASC20, steps 7 to 9). */
  named(sessionId: string, state: JsonObject[string] | undefined, credential: Credential): Session {
    const session = this.registry.find(sessionId, credential);
    if (session !== null) {
      session.check(state);
      return session;
    }
    if (this.registry.findTransport(sessionId, credential) !== null) throw modeConflict(); // SES11
    throw sessionNotFound(sessionId);
  }

  /** Whether the caller has such a session, of either mode. */
  isThere(sessionId: Json | undefined, credential: Credential): boolean {
    if (typeof sessionId !== "string") return false;
    return this.registry.find(sessionId, credential) !== null || this.registry.findTransport(sessionId, credential) !== null;
  }

  private serveIn(
    place: { session: Session | null; isNamed: boolean }, key: string | null, request: Request, caller: Caller, reply: Reply,
  ): void {
    const { session, isNamed } = place;
    const { connection, credential } = caller;
    if (request.method === "subscriptions/listen") {
      serveListen(this, IS_STATELESS ? null : session, isNamed, request, caller, reply);
      return;
    }
    const sender = this.senderOf(request, caller, reply, isNamed);
    const keyed = session === null ? null : key; // KEY14
    const known = keyed === null ? null : session!.keys.look(keyed, request, credential);
    if (session === null && isGated(request)) throw sessionRequired(); // GAT2
    if (connection.openRequests >= LIMITS.unheardRequests * 8) throw limitReached("max_running_requests");
    session?.touch();
    // ATT3: a rule-1 request attaches what is attached nowhere, without replay, if it may hear it (SEC3).
    if (session !== null && isNamed && connection.pushable && session.attachment === null && covers(credential, session.credential)) {
      attach(session, connection, session.log.head);
    }
    if (known !== null && !(known instanceof Run)) {
      reply.answer(answer(request.id, this.dress(known, session, sender))); // KEY4
      return;
    }
    connection.opens(sender);
    reply.onClose(() => this.whenCut(run, sender));
    const run = known ?? this.newRun(session, keyed);
    sender.cancel = () => run.cancel(cancelled());
    if (known !== null) run.join(sender); // KEY5
    else this.begin(run, sender);
  }

  senderOf(request: Request, caller: Caller, reply: Reply, isNamed: boolean): Sender {
    return { ...caller, request, reply, isNamed, cancel: () => {} };
  }

  private newRun(session: Session | null, key: string | null): Run {
    return new Run(
      session,
      key,
      (outcome, sender) => {
        this.forgetId(sender);
        return this.dress(outcome, session, sender);
      },
      (run) => {
        this.runs.delete(run);
        this.unheard.delete(run);
        session?.runs.delete(run);
        session?.touch(); // SES14: from the end of the request
      },
    );
  }

  private begin(run: Run, sender: Sender): void {
    const { session, key } = run;
    if (key !== null) session!.keys.begin(key, sender.request, sender.credential, run); // KEY2
    this.runs.add(run);
    session?.runs.add(run);
    run.join(sender);
    const finish = (outcome: Outcome): void => {
      if (run.signal.aborted) return;
      if ("result" in outcome) session?.apply(run.changes); // STT12, STT13
      if (key !== null) session!.keys.finish(key, outcome); // KEY10
      run.finish(outcome);
    };
    // What was given up has an outcome that nobody knows (KEY11).
    run.signal.addEventListener("abort", () => key !== null && session!.keys.finish(key, null));
    callCore(this, run, sender).then(
      (result) => finish({ result }),
      (error: unknown) => finish(this.asOutcome(error)),
    );
  }

  /** What an answer carries for this sender: the session's newest metadata (ASC12, ASC14), and what the era asks for. */
  dress(outcome: Outcome, session: Session | null, sender: Sender): Outcome {
    if ("error" in outcome) return outcome;
    let { result } = outcome;
    const meta: JsonObject = { ...metaOf(result) };
    if (session !== null && sender.isNamed) meta[SESSION] = session.metadata;
    if (sender.era === "modern") {
      meta[SERVER_INFO] = INFO;
      result = { ...result, resultType: "complete" };
    }
    return { result: Object.keys(meta).length === 0 ? result : { ...result, _meta: meta } };
  }

  /** A response from the client. */
  take(response: Response, credential: Credential): void {
    for (const run of this.runs) if (run.takeAnswer(response, credential)) return;
  }

  /** A notification. It cannot be answered, so nothing refuses it (ASC17). */
  notice(message: Notification, caller: Caller): void {
    if (message.method !== "notifications/cancelled") return;
    const meta = metaOf(message.params);
    const key = meta[REQUEST_KEY];
    const named = meta[SESSION];
    if (named !== undefined && named !== null) {
      const isNamed = isObject(named) && typeof named["sessionId"] === "string";
      const session = isNamed ? this.registry.find(named["sessionId"] as string, caller.credential) : null;
      if (session === null) return; // ASC10
      if (typeof key === "string") {
        session.keys.running(key)?.cancel(cancelled()); // REQ7
        return;
      }
    }
    const requestId = message.params?.["requestId"];
    if (typeof requestId !== "string" && typeof requestId !== "number") return;
    for (const sender of caller.connection.meant(requestId)) sender.cancel(); // REQ1, REQ6
  }

  /** The requests of a connection that ends: those of no session are cancelled (HTL17). */
  cancelSessionless(connection: Connection): void {
    for (const run of [...this.runs]) {
      if (run.session === null && run.newest.connection === connection) run.cancel(cancelled());
    }
  }

  /** HTP6, TKO10: shuts down. What does not finish in time has an outcome that nobody knows. */
  async drain(): Promise<void> {
    this.isDraining = true;
    for (const session of this.registry.all()) {
      session.attachment?.connection.tell(session, "draining", { retryAfter: LIMITS.drainSeconds });
    }
    const end = Date.now() + LIMITS.drainSeconds * 1000;
    while (this.runs.size > 0 && Date.now() < end) await new Promise((wake) => setTimeout(wake, 20));
    for (const run of [...this.runs]) run.cancel(outcomeUnknown());
    for (const session of this.registry.all()) session.listen?.finish(session); // HTM10
    this.drained.forEach((then) => then());
  }

  onDrained(then: () => void): void {
    this.drained.push(then);
  }

  forgetId(sender: Sender): void {
    sender.connection.closes(sender);
  }

  private whenCut(run: Run, sender: Sender): void {
    // REQ5: in the modern era over HTTP a cut response cancels, unless there is a key (REQ5).
    if (sender.era === "modern" && !sender.connection.pushable && run.key === null) run.cancel(cancelled());
    if (!this.runs.has(run) || run.isHeard) return;
    // REQ8: bounded in number and time.
    this.unheard.add(run);
    if (this.unheard.size > LIMITS.unheardRequests) [...this.unheard][0]!.cancel(outcomeUnknown());
    setTimeout(() => run.isHeard || run.cancel(outcomeUnknown()), LIMITS.unheardSeconds * 1000).unref();
  }

  private keyOf(request: Request): string | null {
    const key = metaOf(request.params)[REQUEST_KEY];
    if (key === undefined || isSessionMethod(request.method) || request.method === "subscriptions/listen") return null;
    if (typeof key !== "string" || key.length < 1 || key.length > 256) throw invalidParams("request key");
    return key;
  }

  private checkId(request: Request, caller: Caller): void {
    const { connection } = caller;
    // REQ9: over HTTP each request has a response of its own.
    const isTaken = connection.isOneWire && connection.heard(request.id).length > 0;
    if (isTaken) throw invalidRequest("a request with this id is open", "duplicate_id");
  }
}
