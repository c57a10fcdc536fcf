/** All sessions of both modes, in one id namespace (SES7), and all connections. */

import { detach, type Connection } from "./connection.js";
import type { Credential } from "./credentials.js";
import type { TransportSession } from "./transport_session.js";
import { IS_STATELESS, LIMITS } from "./limits.js";
import { makeSealed, openSealed } from "./sealed.js";
import { Session } from "./session.js";
import { limitReached, sessionNotFound, type Notification } from "./wire.js";

export class Registry {
  /** Those that changes of the server are announced to. */
  readonly connections = new Set<Connection>();
  private readonly sessions = new Map<string, Session>();
  private readonly transportSessions = new Map<string, TransportSession>();

  constructor() {
    setInterval(() => this.sweep(Date.now()), 250).unref();
  }

  make(credential: Credential): Session {
    if (IS_STATELESS) return makeSealed(credential);
    this.checkRoom();
    const session = new Session(credential);
    this.sessions.set(session.id, session);
    return session;
  }

  keep(session: TransportSession): void {
    this.transportSessions.set(session.id, session);
    this.connections.add(session);
  }

  /** The caller's session that is there; expired, ended and foreign ones are not (ERR2, SES8). */
  find(id: string, credential: Credential): Session | null {
    if (IS_STATELESS) return openSealed(id, credential);
    const session = this.sessions.get(id);
    if (session === undefined || session.credential.principal !== credential.principal) return null;
    if (!session.isOver(Date.now())) return session;
    this.end(session);
    return null;
  }

  findTransport(id: string, credential: Credential): TransportSession | null {
    const session = this.transportSessions.get(id);
    return session?.credential.principal === credential.principal ? session : null;
  }

  /** What follows the end of a session, before anybody is told of it (END2, END3, END6, ASK6, HTM10). */
  end(session: Session): void {
    session.isEnded = true;
    this.sessions.delete(session.id);
    detach(session);
    const listen = session.listen;
    session.listen = null;
    listen?.fail(sessionNotFound(session.id)); // HTM18: a listen has not started anything
    for (const run of [...session.runs]) run.cancel(sessionNotFound(session.id, true));
  }

  endTransport(session: TransportSession): void {
    this.transportSessions.delete(session.id);
    this.close(session);
    session.end();
  }

  /** The end of a connection ends no session (ATT9, HTL17). */
  close(connection: Connection): void {
    this.connections.delete(connection);
    for (const session of [...connection.attached]) detach(session);
  }

  /** One event in each session that is entitled to it (EVT1), and a copy where there is none (EVT11). */
  announce(message: Notification): void {
    const uri = message.params?.["uri"];
    for (const session of this.sessions.values()) {
      const isEntitled =
        message.method === "notifications/resources/updated"
          ? session.subscriptions.has(uri as string)
          : session.lists === null || session.lists.has(message.method);
      if (isEntitled && !session.isOver(Date.now())) session.store(message);
    }
    for (const connection of this.connections) connection.hear(message);
  }

  all(): IterableIterator<Session> {
    return this.sessions.values();
  }

  checkRoom(): void {
    if (this.sessions.size + this.transportSessions.size >= LIMITS.sessions) throw limitReached("max_sessions");
  }

  private sweep(now: number): void {
    for (const session of [...this.sessions.values()]) if (session.isOver(now)) this.end(session);
    for (const session of [...this.transportSessions.values()]) if (session.isOver(now)) this.endTransport(session);
  }
}

