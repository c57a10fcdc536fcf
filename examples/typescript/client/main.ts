/** `node build/client/main.js URL`: does what the scripted server of the conformance runner says (conformance/README.md). */

import { Client, type Application } from "./client.js";
import { isObject, Refused, type Json, type JsonObject } from "./wire.js";

const TRIES = 5;
const ERA = process.env["CONFORMANCE_ERA"] === "modern" ? "modern" : "handshake";
const RESOURCES = [1, 2, 3, 4, 5].map((number) => `conformance://e${number}`);

/** One server, and what was heard from it. */
class Visit implements Application {
  readonly heard: string[] = [];
  asked = 0;
  readonly client: Client;
  private waiting: (() => void)[] = [];

  constructor(url: string) {
    this.client = new Client(url, this, ERA);
  }

  notified(method: string, params: JsonObject): void {
    if (method === "notifications/resources/updated") this.heard.push(String(params["uri"]));
    this.waiting.splice(0).forEach((wake) => wake());
  }

  mayHaveMissed(): void {}

  displaced(): void {}

  async ask(): Promise<JsonObject> {
    this.asked += 1;
    return { action: "accept", content: { answer: `answer ${this.asked}` } };
  }

  async hear(count: number): Promise<void> {
    while (this.heard.length < count) await new Promise<void>((wake) => this.waiting.push(wake));
  }

  async follow(): Promise<void> {
    let outcome: Json = null;
    if (ERA === "modern") await this.client.subscribe(...RESOURCES);
    for (;;) {
      const told = await this.next(outcome);
      outcome = null;
      switch (told["do"]) {
        case "call":
          outcome = await this.call(String(told["tool"]), isObject(told["arguments"]) ? told["arguments"] : {});
          break;
        case "hear":
          await this.hear(Number(told["count"]));
          break;
        case "connect":
          await new Visit(String(told["url"])).follow();
          break;
        case "done":
          return this.client.close();
        default: // nothing
      }
    }
  }

  private async next(outcome: Json): Promise<JsonObject> {
    for (let left = TRIES; ; left -= 1) {
      try {
        const result = await this.client.call("next", { outcome: outcome ?? "", heard: [...this.heard], asked: this.asked });
        return JSON.parse(textOf(result)) as JsonObject;
      } catch (error) {
        if (!(error instanceof Refused) || left === 0) throw error;
      }
    }
  }

  private async call(tool: string, args: JsonObject): Promise<string> {
    try {
      return textOf(await this.client.call(tool, args));
    } catch (error) {
      if (error instanceof Refused) return `error ${error.code}`;
      throw error;
    }
  }
}

function textOf(result: JsonObject): string {
  const content = Array.isArray(result["content"]) ? result["content"][0] : undefined;
  return isObject(content) ? String(content["text"]) : "";
}

await new Visit(process.argv[2] ?? process.env["CONFORMANCE_URL"] ?? "").follow();
process.exit(0);
