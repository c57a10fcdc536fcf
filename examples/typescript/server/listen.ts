/** subscriptions/listen: the filter, the acknowledgement, and the end of the stream (HTM1 to HTM10, WSS12). */

import { attach, Connection } from "./connection.js";
import { covers, type Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import { instanceOf } from "./methods.js";
import type { Reply } from "./run.js";
import { type Caller, type Service } from "./service.js";
import type { Session } from "./session.js";
import {
  answer, cancelled, CLIENT_CAPABILITIES, invalidParams, isObject, limitReached, metaOf, methodNotFound, notification, SESSION,
  sessionNotFound, SUBSCRIPTION_ID,
  type JsonObject, type Message, type Notification, type Request, type RequestId, type RpcError,
} from "./wire.js";

const LISTS: Record<string, string> = {
  toolsListChanged: "notifications/tools/list_changed",
  promptsListChanged: "notifications/prompts/list_changed",
  resourcesListChanged: "notifications/resources/list_changed",
};

export interface Filter {
  heard: JsonObject;
  lists: Set<string>;
  uris: Set<string>;
}

/** A listen that is open. */
export interface Listen {
  readonly id: RequestId;
  /** The result of its request (HTM9). */
  finish(session: Session | null): void;
  fail(error: RpcError): void;
}

/** The response stream of a listen over HTTP can be written to until it is full. */
export interface StreamReply extends Reply {
  readonly isFull: boolean;
  onDrain(then: () => void): void;
  /** Ends the stream without the result of its request. */
  cut(): void;
}

/** HTM4. */
export function withSubscription(message: Message, id: RequestId): Message {
  if (!("method" in message)) return message;
  const { params } = message;
  return { ...message, params: { ...params, _meta: { ...metaOf(params), [SUBSCRIPTION_ID]: id } } };
}

export function checkUri(uri: string): void {
  if (Buffer.byteLength(uri) > LIMITS.uriBytes) throw limitReached("max_uri_bytes");
}

function filterOf(request: Request): Filter {
  const asked = request.params?.["notifications"] ?? {};
  if (!isObject(asked)) throw invalidParams("notifications");
  const heard: JsonObject = {};
  const lists = new Set<string>();
  for (const [name, method] of Object.entries(LISTS)) {
    if (asked[name] !== true) continue;
    heard[name] = true;
    lists.add(method);
  }
  const uris = asked["resourceSubscriptions"] ?? [];
  if (!Array.isArray(uris) || !uris.every((uri) => typeof uri === "string")) throw invalidParams("resourceSubscriptions");
  const filter = { heard, lists, uris: new Set(uris as string[]) };
  if (filter.uris.size > LIMITS.subscriptions) throw limitReached("max_subscriptions");
  filter.uris.forEach(checkUri);
  if ("resourceSubscriptions" in asked) heard["resourceSubscriptions"] = [...filter.uris];
  return filter;
}

/** The stream of a listen over HTTP, as the connection that it is. */
class ListenStream extends Connection {
  readonly pushable = true;
  lists = new Set<string>();

  constructor(credential: Credential, private readonly id: RequestId, private readonly reply: StreamReply) {
    super(credential);
    reply.onDrain(() => [...this.attached].forEach((session) => this.pump(session)));
  }

  override push(message: Message): void {
    this.reply.send(withSubscription(message, this.id));
  }

  override pump(session: Session): void {
    const attachment = session.attachment;
    while (attachment !== null && !this.reply.isFull && !this.reply.isClosed) {
      const events = session.log.after(attachment.cursor, Date.now());
      // ATT10: never on behind a hole. Without a result, so that the client resumes (CLI11).
      if (events === null) return this.reply.cut();
      const next = events[0];
      if (next === undefined) return;
      attachment.cursor = next.number;
      this.push(next.message);
    }
  }

  override takeBack(): void {}

  override hear(message: Notification): void {
    const isUpdate = message.method === "notifications/resources/updated";
    const isHeard = isUpdate ? this.subscriptions.has(message.params?.["uri"] as string) : this.lists.has(message.method);
    if (isHeard) this.push(message);
  }
}

/** Duplex connections carry any number of listens. */
export interface Listening extends Connection {
  readonly listens: Map<RequestId, { filter: Filter; session: Session | null }>;
}
const carriesListens = (connection: Connection): connection is Listening => "listens" in connection;

export function serveListen(
  service: Service, session: Session | null, isNamed: boolean, request: Request, caller: Caller, reply: Reply,
): void {
  const { credential, connection } = caller;
  if (caller.era === "handshake" && !(isNamed && connection.pushable && carriesListens(connection))) {
    throw methodNotFound(request.method);
  }
  if (session !== null && !covers(credential, session.credential)) throw sessionNotFound(session.id); // SEC3
  const filter = filterOf(request);
  const { id } = request;
  const sender = service.senderOf(request, caller, reply, isNamed);
  const on = carriesListens(connection) ? connection : streamOf(request, credential, reply as StreamReply, filter, session);

  const over = (): void => {
    service.forgetId(sender);
    if (carriesListens(on)) on.listens.delete(id);
    if (session?.listen === listen) session.listen = null;
    if (on !== connection) service.registry.close(on); // ATT9
  };
  const listen: Listen = {
    id,
    finish(of) {
      over();
      const meta: JsonObject = { [SUBSCRIPTION_ID]: id };
      if (of !== null) meta[SESSION] = of.metadata;
      reply.answer(answer(id, { result: { _meta: meta, resultType: "complete" } }));
    },
    fail(error) {
      over();
      reply.answer(answer(id, error.outcome));
    },
  };
  sender.cancel = () => listen.fail(cancelled()); // WSS19
  connection.opens(sender);

  if (session !== null) {
    session.touch();
    // HTM9, first: the stream that a newer one replaces is not told of a takeover (HTM9).
    session.listen?.finish(session);
    // HTM16. Where nothing was left waiting it begins at the head (HTM7); where it is attached already it goes on.
    if (session.attachment?.connection !== on) attach(session, on, session.waiting ?? session.log.head, instanceOf(request));
    session.listen = listen;
    session.subscriptions = filter.uris; // HTM8
    session.lists = filter.lists;
  } else if (on !== connection) service.registry.connections.add(on);
  if (carriesListens(on)) on.listens.set(id, { filter, session });
  reply.onClose(over);
  const acknowledged = notification("notifications/subscriptions/acknowledged", { notifications: filter.heard });
  reply.send(withSubscription(acknowledged, id)); // HTM2
  if (session !== null) on.pump(session); // HTM2
}

function streamOf(request: Request, credential: Credential, reply: StreamReply, filter: Filter, session: Session | null): ListenStream {
  const stream = new ListenStream(credential, request.id, reply);
  stream.declare(metaOf(request.params)[CLIENT_CAPABILITIES]);
  stream.lists = filter.lists;
  if (session === null) filter.uris.forEach((uri) => stream.subscriptions.add(uri));
  return stream;
}
