/** One connection to the server, for as long as it lasts. A new one is made after each loss (CLI1). */

import { EXTENSION, isObject, Lost, messagesOf, Refused, SESSION, type JsonObject, type Message } from "./wire.js";

const CLIENT = { name: "example-typescript-client", version: "0.1" };
const CAPABILITIES: JsonObject = { elicitation: {}, extensions: { [EXTENSION]: {} } }; // CAP4

export interface Hearer {
  /** A notification or a question of the server, on whichever stream. */
  hear(message: Message): void;
  /** The stream of events is over. */
  lost(link: Link): void;
}

export abstract class Link {
  capabilities: JsonObject = {};
  isOpen = true;
  private ids = 0;
  private readonly aborter = new AbortController();

  constructor(
    protected readonly url: string,
    protected readonly hearer: Hearer,
  ) {}

  /** Whatever is to be said before the session is resumed. */
  abstract open(): Promise<void>;
  /** Begins to hear the events of the session, once it is started or resumed. */
  abstract listen(named: JsonObject, instance: string, uris: string[]): void;
  /** Says good-bye. */
  abstract leave(): Promise<void>;
  protected abstract headersOf(message: Message): Record<string, string>;
  /** What the era asks of every request. */
  protected abstract wrap(params: JsonObject): JsonObject;

  /** The result. Throws `Refused` with the error of an answer, `Lost` if there is none. */
  async request(method: string, params: JsonObject): Promise<JsonObject> {
    const id = (this.ids += 1);
    const message: Message = { jsonrpc: "2.0", id, method, params: this.wrap(params) };
    for await (const answer of this.exchange(message)) {
      if (answer.id !== id || answer.method !== undefined) this.hearer.hear(answer);
      else if (answer.error !== undefined) throw new Refused(answer.error.code, answer.error.message, answer.error.data);
      else return answer.result ?? {};
    }
    throw new Lost(false);
  }

  /** Sends what has no answer. */
  async notify(message: Message): Promise<void> {
    for await (const heard of this.exchange(message)) this.hearer.hear(heard);
  }

  /** Ends everything that is open here. */
  cut(): void {
    this.isOpen = false;
    this.aborter.abort();
  }

  /** What a POST is answered with. Throws `Lost`. */
  private async *exchange(message: Message): AsyncGenerator<Message> {
    const headers = { "Content-Type": "application/json", Accept: "application/json, text/event-stream", ...this.headersOf(message) };
    const response = await this.fetch({ method: "POST", headers, body: JSON.stringify(message) });
    this.see(response);
    // CLI10: the connection is gone, not the session. HTP5, HTP6: the server cannot now.
    if (response.status === 404 && this.isGone(response)) throw new Lost(true);
    if (response.status === 503) throw new Lost(true, Number(response.headers.get("retry-after") ?? 1));
    if (response.status >= 500) throw new Lost(false);
    try {
      yield* messagesOf(response);
    } catch (error) {
      if (error instanceof Refused || error instanceof Lost) throw error;
      throw new Lost(false);
    }
  }

  protected async fetch(init: RequestInit): Promise<Response> {
    try {
      return await fetch(this.url, { ...init, signal: this.aborter.signal });
    } catch (error) {
      const code = (error as { cause?: { code?: string } }).cause?.code;
      throw new Lost(code === "ECONNREFUSED"); // Only what found nobody surely never began.
    }
  }

  /** Hears a stream until it ends, and says so. */
  protected async follow(messages: AsyncGenerator<Message>): Promise<void> {
    try {
      for await (const message of messages) this.hearer.hear(message);
    } catch {
      // A broken stream and one that ends say the same: come back.
    }
    if (this.isOpen) this.hearer.lost(this);
  }

  protected see(_: Response): void {}
  protected isGone(_: Response): boolean {
    return false;
  }

  protected nextId(): number {
    return (this.ids += 1);
  }

  protected exchangeOf(message: Message): AsyncGenerator<Message> {
    return this.exchange(message);
  }
}

/** 2025-11-25: `initialize`, Mcp-Session-Id, the GET stream. */
export class HandshakeLink extends Link {
  private connection: string | null = null;
  private version = "2025-11-25";

  override async open(): Promise<void> {
    const result = await this.request("initialize", { protocolVersion: this.version, capabilities: CAPABILITIES, clientInfo: CLIENT });
    this.version = String(result["protocolVersion"]);
    if (isObject(result["capabilities"])) this.capabilities = result["capabilities"];
    await this.notify({ jsonrpc: "2.0", method: "notifications/initialized" });
    void this.follow(this.stream());
  }

  private async *stream(): AsyncGenerator<Message> {
    const response = await this.fetch({ method: "GET", headers: { Accept: "text/event-stream", ...this.headersOf({ jsonrpc: "2.0" }) } });
    if (response.status === 405) await new Promise(() => {}); // There is none: nothing to come back for.
    if (response.ok) yield* messagesOf(response);
  }

  /** Events come on the GET stream (HTL3). */
  override listen(): void {}

  override async leave(): Promise<void> {
    await this.fetch({ method: "DELETE", headers: this.headersOf({ jsonrpc: "2.0" }) });
    this.cut();
  }

  /** The header names the connection, never the session (RES10, HTP4). */
  protected override headersOf(message: Message): Record<string, string> {
    if (message.method === "initialize") return {};
    const version = { "MCP-Protocol-Version": this.version };
    return this.connection === null ? version : { ...version, "Mcp-Session-Id": this.connection };
  }

  protected override wrap(params: JsonObject): JsonObject {
    return params;
  }

  protected override see(response: Response): void {
    this.connection ??= response.headers.get("mcp-session-id");
  }

  protected override isGone(): boolean {
    return this.connection !== null;
  }
}

/** 2026-07-28: each request stands alone, and events come on the response to a listen. */
export class ModernLink extends Link {
  static readonly version = "2026-07-28";

  override async open(): Promise<void> {
    const result = await this.request("server/discover", {});
    if (isObject(result["capabilities"])) this.capabilities = result["capabilities"];
  }

  /** HTM1. CLI11: called after `session/start` or `session/resume` only. */
  override listen(named: JsonObject, instance: string, uris: string[]): void {
    const lists = { toolsListChanged: true, promptsListChanged: true, resourcesListChanged: true };
    const params = this.wrap({
      notifications: { ...lists, resourceSubscriptions: uris },
      _meta: { ...named, "io.github.mcp-sessions/instance": instance },
    });
    void this.follow(this.exchangeOf({ jsonrpc: "2.0", id: this.nextId(), method: "subscriptions/listen", params }));
  }

  override async leave(): Promise<void> {
    this.cut();
  }

  protected override headersOf({ method, params }: Message): Record<string, string> {
    const headers: Record<string, string> = { "MCP-Protocol-Version": ModernLink.version, "Mcp-Method": method ?? "" };
    if (typeof params?.["name"] === "string") headers["Mcp-Name"] = params["name"];
    const meta = params?.["_meta"];
    const session = isObject(meta) ? meta[SESSION] : undefined;
    // HTP4: it mirrors the session of _meta.
    if (isObject(session) && typeof session["sessionId"] === "string") headers["Mcp-Session-Id"] = session["sessionId"];
    return headers;
  }

  protected override wrap(params: JsonObject): JsonObject {
    const meta = isObject(params["_meta"]) ? params["_meta"] : {};
    const envelope = {
      "io.modelcontextprotocol/protocolVersion": ModernLink.version,
      "io.modelcontextprotocol/clientInfo": CLIENT,
      "io.modelcontextprotocol/clientCapabilities": { extensions: { [EXTENSION]: {} } },
    };
    return { ...params, _meta: { ...envelope, ...meta } };
  }
}
