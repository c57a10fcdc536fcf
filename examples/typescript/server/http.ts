/** Streamable HTTP: what both eras have in common, and which of them a request is of (HTP). */

import type { IncomingMessage, Server, ServerResponse } from "node:http";
import { createServer } from "node:http";
import { unauthorized, type Credential, type Tokens } from "./credentials.js";
import { serveHandshake } from "./http_handshake.js";
import { serveModern } from "./http_modern.js";
import { LIMITS } from "./limits.js";
import type { Service } from "./service.js";
import { answer, HANDSHAKE_VERSIONS, invalidRequest, isRequest, parse, RpcError, type Message, type RequestId } from "./wire.js";

export const PATH = "/mcp";

export interface Exchange {
  request: IncomingMessage;
  response: ServerResponse;
  credential: Credential;
}

export function header({ request }: { request: IncomingMessage }, name: string): string | undefined {
  const value = request.headers[name];
  return Array.isArray(value) ? value[0] : value;
}

export function sendJson(response: ServerResponse, status: number, body: unknown, headers: Record<string, string> = {}): void {
  if (response.headersSent || response.destroyed) return;
  response.writeHead(status, { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...headers });
  response.end(body === undefined ? undefined : JSON.stringify(body));
}

export const refuse = (
  response: ServerResponse, status: number, error: RpcError, id: RequestId | null = null, headers: Record<string, string> = {},
): void => sendJson(response, status, answer(id, error.outcome), headers);

const LOOPBACK = ["127.0.0.1", "localhost", "[::1]"];

/** SEC9: the status of the refusal, or null. */
export function checkHost(request: IncomingMessage): number | null {
  const isLoopback = (host: string): boolean => LOOPBACK.includes(host.replace(/:[0-9]+$/, "").toLowerCase());
  if (!isLoopback(request.headers.host ?? "")) return 421;
  const { origin } = request.headers;
  return origin === undefined || isLoopback(origin.replace(/^https?:\/\//i, "")) ? null : 403;
}

export const pathOf = (request: IncomingMessage): string => (request.url ?? "").split("?")[0]!;

/** The message of a POST; undefined if the refusal is sent. */
export async function readMessage({ request, response }: Exchange): Promise<Message | undefined> {
  const chunks: Buffer[] = [];
  let size = 0;
  for await (const chunk of request) {
    size += (chunk as Buffer).length;
    if (size <= LIMITS.messageBytes) chunks.push(chunk as Buffer);
  }
  if (size > LIMITS.messageBytes) {
    refuse(response, 413, invalidRequest("the message is too large"));
    return undefined;
  }
  const parsed = parse(Buffer.concat(chunks).toString());
  if ("message" in parsed) return parsed.message;
  sendJson(response, 400, parsed.refusal);
  return undefined;
}

export function serveHttp(service: Service, tokens: Tokens): Server {
  const handle = async (request: IncomingMessage, response: ServerResponse): Promise<void> => {
    const forbidden = checkHost(request);
    if (forbidden !== null) return refuse(response, forbidden, invalidRequest("this host or origin is not allowed"));
    if (pathOf(request) !== PATH) return sendJson(response, 404, undefined);
    const credential = tokens.ofHeader(request.headers.authorization);
    if (credential === null) return refuse(response, 401, unauthorized(), null, { "WWW-Authenticate": "Bearer" });

    const exchange = { request, response, credential };
    const version = header(exchange, "mcp-protocol-version");
    const serve = version === undefined || HANDSHAKE_VERSIONS.includes(version) ? serveHandshake : serveModern; // HTP1
    if (request.method !== "POST") return serve(service, exchange, undefined);
    const message = await readMessage(exchange);
    if (message === undefined) return;
    // HTP6: answers and notifications of the handshake era are still taken.
    if (service.isDraining && (isRequest(message) || serve === serveModern)) {
      const retry = { "Retry-After": String(LIMITS.drainSeconds) };
      return refuse(response, 503, new RpcError(-32603, "Internal error: the server shuts down"), null, retry);
    }
    serve(service, exchange, message);
  };
  return createServer((request, response) => {
    handle(request, response).catch((error: unknown) => {
      // A boundary: whatever is wrong with one exchange is no reason to end the others.
      if (!request.destroyed) console.error(error);
      if (response.headersSent) response.destroy();
      else refuse(response, 500, new RpcError(-32603, "Internal error"));
    });
  });
}
