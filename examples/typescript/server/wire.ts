/** JSON-RPC messages, the names of this extension, and its errors (spec/errors.md). */

export type Json = null | boolean | number | string | Json[] | { [member: string]: Json };
export type JsonObject = { [member: string]: Json };
export type RequestId = string | number;

export interface Request {
  jsonrpc: "2.0";
  id: RequestId;
  method: string;
  params?: JsonObject;
}
export interface Notification {
  jsonrpc: "2.0";
  method: string;
  params?: JsonObject;
}
export interface Response {
  jsonrpc: "2.0";
  id: RequestId | null;
  result?: JsonObject;
  error?: { code: number; message: string; data?: Json };
}
export type Message = Request | Notification | Response;
export type Outcome = { result: JsonObject } | { error: NonNullable<Response["error"]> };

export const SESSION = "io.modelcontextprotocol/session";
export const SUBSCRIPTION_ID = "io.modelcontextprotocol/subscriptionId";
export const PROTOCOL_VERSION = "io.modelcontextprotocol/protocolVersion";
export const CLIENT_CAPABILITIES = "io.modelcontextprotocol/clientCapabilities";
export const SERVER_INFO = "io.modelcontextprotocol/serverInfo";
export const EXTENSION = "io.github.mcp-sessions/sessions";
export const REQUEST_KEY = "io.github.mcp-sessions/requestKey";
export const INSTANCE = "io.github.mcp-sessions/instance";
export const HEAD = "io.github.mcp-sessions/sessionEventId";

export const MODERN = "2026-07-28";
export const HANDSHAKE_VERSIONS = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"];

export const isObject = (value: unknown): value is JsonObject =>
  typeof value === "object" && value !== null && !Array.isArray(value);
export const isRequest = (message: Message): message is Request => "method" in message && "id" in message;
export const isResponse = (message: Message): message is Response => !("method" in message);

export const metaOf = (params: JsonObject | undefined): JsonObject => {
  const meta = params?.["_meta"];
  return isObject(meta) ? meta : {};
};

/** An error that is an answer. Its code is what programs decide by. */
export class RpcError extends Error {
  constructor(
    readonly code: number,
    message: string,
    readonly data?: Json,
  ) {
    super(message);
  }

  get outcome(): Outcome {
    const { code, message, data } = this;
    return { error: data === undefined ? { code, message } : { code, message, data } };
  }
}

/** ERR1, and `started` only if it had begun (END6). */
export const sessionNotFound = (sessionId: string, started = false): RpcError =>
  new RpcError(-32043, "Session not found", started ? { sessionId, started } : { sessionId });
export const sessionRequired = (): RpcError => new RpcError(-31044, "Session required"); // GAT2
export const sessionDetached = (): RpcError => new RpcError(-31010, "Session detached"); // TKO5
export const limitReached = (limit: string): RpcError => new RpcError(-31011, "Limit reached", { limit }); // ERR6
export const outcomeUnknown = (): RpcError => new RpcError(-31012, "Outcome unknown"); // ERR7
export const invalidParams = (what: string): RpcError => new RpcError(-32602, `Invalid params: ${what}`); // ASC10
export const invalidState = (): RpcError =>
  new RpcError(-32602, "Invalid params: state", { reason: "invalid_state" }); // STT8
export const invalidRequest = (what: string, reason?: string): RpcError =>
  new RpcError(-32600, `Invalid request: ${what}`, reason === undefined ? undefined : { reason }); // SES11, KEY8, REQ2
export const modeConflict = (): RpcError => invalidRequest("this means is of the other mode", "mode_conflict");
export const methodNotFound = (method: string): RpcError => new RpcError(-32601, `Method not found: ${method}`);
export const cancelled = (): RpcError => new RpcError(-32800, "Request cancelled"); // REQ6
export const draining = (): RpcError =>
  new RpcError(-32603, "Internal error: the server shuts down", { reason: "draining", started: false }); // ERR15

/** What `text` says, or the answer to what is no JSON-RPC message (WSS14). */
export function parse(text: string): { message: Message } | { refusal: Response } {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return { refusal: answer(null, new RpcError(-32700, "Parse error").outcome) };
  }
  const id = isObject(value) && (typeof value["id"] === "string" || Number.isInteger(value["id"])) ? value["id"] : null;
  const refusal = answer(id as RequestId | null, invalidRequest("no JSON-RPC message").outcome);
  if (!isObject(value) || value["jsonrpc"] !== "2.0") return { refusal };
  if ("method" in value) {
    if (typeof value["method"] !== "string") return { refusal };
    if ("params" in value && !isObject(value["params"])) return { refusal };
    if ("id" in value && id === null) return { refusal };
  } else if (id === null || "result" in value === "error" in value) return { refusal };
  return { message: value as unknown as Message };
}

export const answer = (id: RequestId | null, outcome: Outcome): Response => ({ jsonrpc: "2.0", id, ...outcome });
export const notification = (method: string, params: JsonObject = {}): Notification => ({ jsonrpc: "2.0", method, params });
export const byteLength = (message: unknown): number => Buffer.byteLength(JSON.stringify(message));

/** Two requests with one id are one only if the ids have one type: 1 is not "1". */
export const idKey = (id: RequestId): string => JSON.stringify(id);

/** JSON with the members in one order, for comparing content (KEY8). */
export function canonical(value: Json): string {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (!isObject(value)) return JSON.stringify(value);
  const members = Object.keys(value).sort();
  return `{${members.map((name) => `${JSON.stringify(name)}:${canonical(value[name] as Json)}`).join(",")}}`;
}
