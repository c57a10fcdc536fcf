/** WebSocket, by an upgrade on the URL of the HTTP endpoint (WSS). */

import type { IncomingMessage, Server } from "node:http";
import type { Duplex as Socket } from "node:stream";
import { WebSocketServer, type WebSocket } from "ws";
import type { Credential, Tokens } from "./credentials.js";
import { Duplex } from "./duplex.js";
import { checkHost, PATH, pathOf } from "./http.js";
import { LIMITS } from "./limits.js";
import type { Service } from "./service.js";

const BEARER = "mcp.bearer.";

/** SEC9, WSS7: the credential, or the HTTP status of the refusal. */
function admit(request: IncomingMessage, service: Service, tokens: Tokens): Credential | number {
  const forbidden = checkHost(request);
  if (forbidden !== null) return forbidden;
  if (pathOf(request) !== PATH) return 404;
  const offered = (request.headers["sec-websocket-protocol"] ?? "").split(",").map((name) => name.trim());
  const bearers = offered.filter((name) => name.startsWith(BEARER));
  const { authorization } = request.headers;
  if (bearers.length > 1 || (bearers.length === 1 && authorization !== undefined)) return 400;
  let token: string | undefined;
  if (bearers.length === 1) {
    const encoded = bearers[0]!.slice(BEARER.length);
    token = Buffer.from(encoded, "base64url").toString();
    if (encoded === "" || Buffer.from(token).toString("base64url") !== encoded) return 400;
  }
  const credential = token === undefined ? tokens.ofHeader(authorization) : tokens.of(token);
  if (credential === null) return 401;
  return service.isDraining ? 503 : credential; // WSS17
}

const REASONS: Record<number, string> = {
  400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 421: "Misdirected Request", 503: "Service Unavailable",
};

function refuse(socket: Socket, status: number): void {
  const more = status === 503 ? `Retry-After: ${LIMITS.drainSeconds}\r\n` : status === 401 ? "WWW-Authenticate: Bearer\r\n" : "";
  socket.end(`HTTP/1.1 ${status} ${REASONS[status]}\r\n${more}Content-Length: 0\r\nConnection: close\r\n\r\n`);
}

export function serveWebSocket(http: Server, service: Service, tokens: Tokens): void {
  const server = new WebSocketServer({
    noServer: true,
    perMessageDeflate: false, // WSS9
    maxPayload: LIMITS.messageBytes, // WSS5: ws closes with 1009
    handleProtocols: (offered) => (offered.has("mcp") ? "mcp" : false), // WSS2
  });
  http.on("upgrade", (request: IncomingMessage, socket: Socket, head: Buffer) => {
    socket.on("error", () => socket.destroy());
    const admitted = admit(request, service, tokens);
    if (typeof admitted === "number") return refuse(socket, admitted);
    server.handleUpgrade(request, socket, head, (peer) => serve(peer, admitted, service));
  });
  service.onDrained(() => server.clients.forEach((peer) => peer.close(1012))); // WSS17
}

function serve(peer: WebSocket, credential: Credential, service: Service): void {
  const connection = new Duplex(credential, service, {
    send: (text) => peer.send(text), // WSS3
    get waiting() {
      return peer.bufferedAmount;
    },
    cut: () => {
      peer.close(1013);
      connection.close();
      setTimeout(() => peer.terminate(), 1000).unref();
    },
  });
  const timers = [setTimeout(() => peer.close(1008), LIMITS.silentSeconds * 1000)]; // WSS16
  const isFinite = credential.expires !== Infinity;
  if (isFinite) timers.push(setTimeout(() => (connection.close(), peer.close(1008)), credential.expires - Date.now())); // SEC4
  peer.on("message", (data, isBinary) => {
    clearTimeout(timers[0]);
    if (isBinary) peer.close(1003); // WSS3
    else if (!connection.isClosed) connection.receive(data.toString());
  });
  peer.on("error", () => {}); // Its close follows.
  peer.on("close", () => {
    timers.forEach(clearTimeout);
    connection.close();
  });
}
