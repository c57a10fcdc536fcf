/** Streamable HTTP of the modern era: each POST is a connection of its own (HTM). */

import type { ServerResponse } from "node:http";
import { LonePost } from "./connection.js";
import { header, refuse, sendJson, type Exchange } from "./http.js";
import type { StreamReply } from "./listen.js";
import { namedSession, type Service } from "./service.js";
import { Sse } from "./sse.js";
import { invalidRequest, isRequest, isResponse, modeConflict, MODERN, RpcError, type Message, type Request, type Response } from "./wire.js";

const headerMismatch = (): RpcError => new RpcError(-32020, "Header mismatch"); // HTM11
const unsupported = (): RpcError => new RpcError(-32022, "Unsupported protocol version", { supported: [MODERN] });

export function serveModern(service: Service, exchange: Exchange, message: Message | undefined): void {
  const { response, credential } = exchange;
  if (message === undefined) return sendJson(response, 405, undefined, { Allow: "POST" });
  const id = isRequest(message) ? message.id : null;
  if (header(exchange, "mcp-protocol-version") !== MODERN) return refuse(response, 400, unsupported(), id);
  if (isResponse(message)) return refuse(response, 400, invalidRequest("nothing was asked"), message.id);
  const connection = new LonePost(credential);
  const caller = { connection, credential, era: "modern" as const };
  const reply = new ModernReply(exchange);
  if (isRequest(message)) {
    const refusal = checkHeaders(service, exchange, message);
    if (refusal !== null) return refuse(response, 400, refusal, id);
    service.serve(message, caller, reply);
    return;
  }
  service.notice(message, caller); // REQ7
  sendJson(response, 202, undefined);
}

/** RES10, HTM11. */
function checkHeaders(service: Service, exchange: Exchange, message: Request): RpcError | null {
  const id = header(exchange, "mcp-session-id");
  if (message.method === "session/resume") {
    const sessionId = message.params?.["sessionId"];
    const isConflict = header(exchange, "last-event-id") !== undefined || (id !== undefined && id === sessionId);
    return isConflict && service.isThere(sessionId, exchange.credential) ? modeConflict() : null;
  }
  try {
    const named = namedSession(message.params);
    return id !== undefined && named && named.sessionId !== id ? headerMismatch() : null;
  } catch {
    return null; // ASC10 refuses it in its turn.
  }
}

/** 2026-07-28's statuses (HTP2). */
function statusOf({ error }: Response): number {
  switch (error?.code) {
    case -32600:
    case -32602:
      return 400;
    case -32601:
      return 404;
    default:
      return 200;
  }
}

/** JSON, or a stream as soon as something is sent before the answer. */
class ModernReply implements StreamReply {
  private sse: Sse | null = null;
  private isAnswered = false;
  private readonly drains: (() => void)[] = [];

  constructor(private readonly exchange: Exchange) {}

  get isClosed(): boolean {
    return this.response.destroyed || this.sse?.isClosed === true;
  }

  get isFull(): boolean {
    return this.sse?.isFull ?? false;
  }

  begin(): void {}

  send(message: Message): void {
    if (this.sse === null) {
      this.sse = new Sse(this.response, this.exchange.credential);
      this.sse.onDrain(() => this.drains.forEach((then) => then()));
    }
    this.sse.write(message);
  }

  answer(message: Response): void {
    this.isAnswered = true;
    if (this.sse === null) return sendJson(this.response, statusOf(message), message);
    this.sse.write(message);
    this.sse.end();
  }

  cut(): void {
    this.sse?.end();
  }

  onDrain(then: () => void): void {
    this.drains.push(then);
  }

  onClose(then: () => void): void {
    this.response.on("close", () => !this.isAnswered && then());
  }

  private get response(): ServerResponse {
    return this.exchange.response;
  }
}
