/** JSON-RPC messages and server-sent events, as a client sees them. */

export type Json = null | boolean | number | string | Json[] | { [member: string]: Json };
export type JsonObject = { [member: string]: Json };

export interface Message {
  jsonrpc: "2.0";
  id?: string | number;
  method?: string;
  params?: JsonObject;
  result?: JsonObject;
  error?: { code: number; message: string; data?: Json };
}

export const SESSION = "io.modelcontextprotocol/session";
export const EXTENSION = "io.github.mcp-sessions/sessions";
export const REQUEST_KEY = "io.github.mcp-sessions/requestKey";
export const INSTANCE = "io.github.mcp-sessions/instance";

export const HEAD = "io.github.mcp-sessions/sessionEventId";

export const isObject = (value: unknown): value is JsonObject =>
  typeof value === "object" && value !== null && !Array.isArray(value);

/** What a request came to nothing by. */
export class Lost extends Error {
  constructor(
    /** It certainly never began: it may be sent again without a key (KEY17). */
    readonly neverBegan: boolean,
    /** Seconds that the server asks to wait (HTP5, HTP6). */
    readonly retryAfter = 0,
  ) {
    super("the connection was lost");
  }
}

/** The error that a request was answered with, or that its caller gets instead of an answer (ERR7). */
export class Refused extends Error {
  constructor(
    readonly code: number,
    message: string,
    readonly data?: Json,
  ) {
    super(message);
  }
}
export const outcomeUnknown = (): Refused => new Refused(-31012, "Outcome unknown");

/** The messages of a response body: one of JSON, or each of an event stream. Throws when the stream breaks. */
export async function* messagesOf(response: Response): AsyncGenerator<Message> {
  if (!(response.headers.get("content-type") ?? "").startsWith("text/event-stream")) {
    const text = await response.text();
    if (text !== "") yield JSON.parse(text) as Message;
    return;
  }
  const decoder = new TextDecoder();
  let left = "";
  for await (const chunk of response.body!) {
    left += decoder.decode(chunk as Uint8Array, { stream: true });
    // A carriage return at the end may be half of a line end.
    const events = left.replace(/\r\n|\r(?!$)/g, "\n").split("\n\n");
    left = events.pop()!;
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data:"));
      const text = data.map((line) => line.slice(line[5] === " " ? 6 : 5)).join("\n");
      if (text !== "") yield JSON.parse(text) as Message;
    }
  }
}
