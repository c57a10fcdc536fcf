/** Streamable HTTP of the handshake era: which connection a message is on, and its responses (HTL). */

import type { ServerResponse } from "node:http";
import { LonePost, type Connection } from "./connection.js";
import { header, refuse, sendJson, type Exchange } from "./http.js";
import { isSessionMethod } from "./methods.js";
import { IS_STATELESS } from "./limits.js";
import type { ResponseStream } from "./response_stream.js";
import type { Reply } from "./run.js";
import { namedSession, type Service } from "./service.js";
import { Sse } from "./sse.js";
import { TransportSession } from "./transport_session.js";
import { answer, isRequest, isResponse, modeConflict, RpcError, invalidRequest, type Message, type Request, type Response } from "./wire.js";

const gone = (): RpcError => new RpcError(-32001, "Session not found");

/** An error that has an HTTP status of its own. */
class Refused {
  constructor(readonly status: number, readonly error: RpcError) {}
}

export function serveHandshake(service: Service, exchange: Exchange, message: Message | undefined): void {
  const { request, response, credential } = exchange;
  const id = message !== undefined && isRequest(message) ? message.id : null;
  try {
    if (message !== undefined) {
      serveMessage(service, exchange, message);
    } else if (request.method === "GET" || request.method === "DELETE") {
      const connection = named(service, exchange);
      if (request.method === "DELETE") {
        service.registry.endTransport(connection); // HTL17
        service.cancelSessionless(connection);
        return sendJson(response, 200, undefined);
      }
      // SEC3
      if (!connection.mayHear(credential) || !connection.openStream(response, header(exchange, "last-event-id"), credential)) {
        throw new Refused(404, gone());
      }
    } else sendJson(response, 405, undefined, { Allow: "GET, POST, DELETE" });
  } catch (error) {
    if (error instanceof Refused) return refuse(response, error.status, error.error, id);
    sendJson(response, 200, answer(id, service.asOutcome(error)));
  }
}

/** The connection of Mcp-Session-Id (HTL13, HTL14, HTL18). */
function named(service: Service, exchange: Exchange): TransportSession {
  const id = header(exchange, "mcp-session-id");
  if (id === undefined) throw new Refused(400, invalidRequest("Mcp-Session-Id is missing"));
  const connection = service.registry.findTransport(id, exchange.credential);
  if (connection !== null) {
    connection.touch();
    return connection;
  }
  if (service.registry.find(id, exchange.credential) !== null) throw new Refused(400, modeConflict());
  throw new Refused(404, gone());
}

function serveMessage(service: Service, exchange: Exchange, message: Message): void {
  const { response, credential } = exchange;
  const connection = connectionOf(service, exchange, message);
  const caller = { connection, credential, era: "handshake" as const };
  if (isRequest(message)) {
    const isConflict = message.method === "session/resume" && header(exchange, "last-event-id") !== undefined;
    if (isConflict && service.isThere(message.params?.["sessionId"], credential)) throw modeConflict(); // RES10
    service.serve(message, caller, new PostReply(service, exchange, connection, message));
    return;
  }
  if (isResponse(message)) service.take(message, credential);
  else service.notice(message, caller);
  sendJson(response, 202, undefined);
}

function connectionOf(service: Service, exchange: Exchange, message: Message): Connection {
  const { credential } = exchange;
  const id = header(exchange, "mcp-session-id");
  if (isResponse(message)) return named(service, exchange);
  const sessionId = inMeta(message);
  if (message.method === "initialize" && isRequest(message)) {
    if (id !== undefined && id !== sessionId) named(service, exchange); // HTL1
    if (IS_STATELESS) return new LonePost(credential); // SLS5
    service.registry.checkRoom();
    return new TransportSession(credential);
  }
  // HTP3: a mirror means no connection. ASC9: these need none.
  const isMirror = id !== undefined && id === sessionId;
  if (isMirror || (id === undefined && (sessionId !== undefined || isSessionMethod(message.method)))) return new LonePost(credential);
  if (IS_STATELESS && id === undefined) return new LonePost(credential);
  return named(service, exchange);
}

function inMeta(message: Exclude<Message, Response>): string | undefined {
  try {
    return namedSession(message.params)?.sessionId;
  } catch {
    return undefined; // ASC10 refuses it in its turn.
  }
}

/** The response to a POST: JSON, or from the beginning of a tool call a stream that can be continued. */
class PostReply implements Reply {
  private stream: ResponseStream | null = null;
  private isAnswered = false;

  constructor(
    private readonly service: Service,
    private readonly exchange: Exchange,
    private readonly connection: Connection,
    private readonly request: Request,
  ) {}

  get isClosed(): boolean {
    return this.stream?.isClosed ?? this.response.destroyed;
  }

  begin(): void {
    if (this.request.method !== "tools/call" || !(this.connection instanceof TransportSession)) return;
    const sse = new Sse(this.response, this.exchange.credential);
    this.stream = this.connection.newResponse(this.request.id, sse, this.exchange.credential);
    this.stream.onClose(() => this.closers.forEach((then) => then()));
  }

  send(message: Message): void {
    this.stream?.send(message);
  }

  answer(message: Response): void {
    this.isAnswered = true;
    if (this.stream !== null) return this.stream.answer(message);
    const headers: Record<string, string> = {};
    if (this.request.method === "initialize" && this.connection instanceof TransportSession && message.result !== undefined) {
      this.service.registry.keep(this.connection);
      headers["Mcp-Session-Id"] = this.connection.id; // HTL1
    }
    sendJson(this.response, 200, message, headers); // HTP2
  }

  private readonly closers: (() => void)[] = [];

  onClose(then: () => void): void {
    this.closers.push(then);
    this.response.on("close", () => this.stream === null && !this.isAnswered && then());
  }

  private get response(): ServerResponse {
    return this.exchange.response;
  }
}
