/** Connections (ASC7), and which of them a session is attached to (ATT, TKO). */

import { IS_STATELESS } from "./limits.js";
import type { Credential } from "./credentials.js";
import type { Sender } from "./run.js";
import type { Session } from "./session.js";
import {
  EXTENSION, idKey, isObject, notification,
  type JsonObject, type Message, type Notification, type RequestId,
} from "./wire.js";

export abstract class Connection {
  /** Rule 2: the session of requests that name none (ASC5). */
  current: Session | null = null;
  readonly attached = new Set<Session>();
  /** What was subscribed to outside of any session (EVT13). */
  readonly subscriptions = new Set<string>();
  /** Open requests by their id, oldest first. */
  private readonly open = new Map<string, Sender[]>();
  /** Whether all answers share one wire, where their ids alone tell them apart (REQ2, REQ9). */
  readonly isOneWire: boolean = false;
  /** Whether there was an `initialize`, and what it declared (CAP4, ASK4). */
  handshake = false;
  version = "";
  declared = false;
  elicits = false;

  constructor(readonly credential: Credential) {}

  /** Whether anything can be sent that is no response. */
  abstract readonly pushable: boolean;
  /** Sends a message of the connection itself. */
  abstract push(message: Message): void;
  /** Hands over the events of the session that were not handed over yet. */
  abstract pump(session: Session): void;
  /** Takes back what was not sent of the session (TKO1, END3). */
  abstract takeBack(session: Session): void;

  declare(capabilities: unknown): void {
    if (!isObject(capabilities)) return;
    const { extensions, experimental, elicitation } = capabilities;
    this.declared =
      (isObject(extensions) && EXTENSION in extensions) || (isObject(experimental) && "experimental/sessions" in experimental);
    this.elicits = isObject(elicitation);
  }

  get openRequests(): number {
    return [...this.open.values()].reduce((sum, same) => sum + same.length, 0);
  }

  opens(sender: Sender): void {
    const id = idKey(sender.request.id as RequestId);
    this.open.set(id, [...(this.open.get(id) ?? []), sender]);
  }

  closes(sender: Sender): void {
    const id = idKey(sender.request.id as RequestId);
    const left = (this.open.get(id) ?? []).filter((other) => other !== sender);
    if (left.length > 0) this.open.set(id, left);
    else this.open.delete(id);
  }

  /** Those with an id whose response is open. */
  heard(id: RequestId): Sender[] {
    return (this.open.get(idKey(id)) ?? []).filter((sender) => !sender.reply.isClosed);
  }

  /** REQ3: those that a cancellation by an id means. */
  meant(id: RequestId): Sender[] {
    const heard = this.heard(id);
    return heard.length > 0 ? heard : (this.open.get(idKey(id)) ?? []).slice(-1);
  }

  /** A server-wide change, outside of any session (EVT11). */
  hear(message: Notification): void {
    const uri = message.params?.["uri"];
    const isUpdate = message.method === "notifications/resources/updated";
    if (isUpdate ? this.subscriptions.has(uri as string) : this.handshake && this.attached.size === 0) this.push(message);
  }

  /** TKO3: only who declared the extension is told. */
  tell(session: Session, reason: string, more: JsonObject = {}): void {
    if (this.declared) this.push(notification("notifications/sessions/detached", { sessionId: session.id, reason, ...more }));
  }
}

/** ASC7: lives as long as its response, and nothing is attached to it. */
export class LonePost extends Connection {
  readonly pushable = false;
  override push(): void {}
  override pump(): void {}
  override takeBack(): void {}
}

/** Makes the connection the only one, from `cursor` on (RES3, RES5). The caller pumps when its answer is out (RES6). */
export function attach(session: Session, connection: Connection, cursor: number, instance?: string): void {
  if (IS_STATELESS) return; // SLS5
  if (session.attachment?.connection === connection) connection.takeBack(session); // RES8
  else displace(session, "taken_over", instance);
  session.attachment = { connection, cursor };
  session.holder = connection;
  session.waiting = null;
  connection.attached.add(session);
}

/** TKO1, TKO3, TKO5: another connection has it now, or where nothing can be pushed none has (RES12, HTM6). */
export function displace(session: Session, reason: "taken_over" | "evicted", instance?: string): void {
  const before = session.attachment?.connection;
  detach(session);
  session.holder = null;
  if (before === undefined) return;
  before.tell(session, reason, instance === undefined ? {} : { instance }); // TKO12
  const listen = session.listen;
  session.listen = null;
  listen?.finish(session);
}

/** ATT9: it lives on. Its events wait in the window. */
export function detach(session: Session): void {
  const connection = session.attachment?.connection;
  session.attachment = null;
  if (connection === undefined) return;
  connection.attached.delete(session);
  connection.takeBack(session);
}
