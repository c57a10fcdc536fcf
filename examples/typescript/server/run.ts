/** A request that runs: who waits for its answer, and what it asks its client (REQ, KEY5, KEY6, ASK). */

import { randomUUID } from "node:crypto";
import type { Connection } from "./connection.js";
import type { Credential } from "./credentials.js";
import type { Session } from "./session.js";
import { answer, notification, RpcError, type Json, type JsonObject, type Message, type Outcome, type Request, type Response } from "./wire.js";

export type Era = "handshake" | "modern";

/** The way of one response. */
export interface Reply {
  /** Nobody can be answered here any more. */
  readonly isClosed: boolean;
  /** The handler is about to begin. */
  begin(): void;
  /** A message on the request's own channel (EVT5). */
  send(message: Message): void;
  /** The last message. What is closed ignores it. */
  answer(message: Response): void;
  onClose(then: () => void): void;
}

/** One sending of a request. A key may have several. */
export interface Sender {
  connection: Connection;
  credential: Credential;
  era: Era;
  request: Request;
  reply: Reply;
  /** Rule 1: the result carries metadata (ASC12). */
  isNamed: boolean;
  /** What a cancellation by its id does. */
  cancel: () => void;
}

interface Question {
  request: Request;
  asked: Reply;
  settle: (answer: Response | Error) => void;
}

export class Run {
  readonly senders: Sender[] = [];
  readonly changes = new Map<string, Json>();
  private readonly aborter = new AbortController();
  private readonly questions = new Map<string, Question>();
  private isOver = false;

  constructor(
    readonly session: Session | null,
    readonly key: string | null,
    /** Makes the answer for one sender. */
    private readonly dress: (outcome: Outcome, sender: Sender) => Outcome,
    private readonly whenOver: (run: Run) => void,
  ) {}

  get signal(): AbortSignal {
    return this.aborter.signal;
  }

  /** KEY6: progress and questions go to the newest sending. */
  get newest(): Sender {
    return this.senders[this.senders.length - 1]!;
  }

  get isHeard(): boolean {
    return this.senders.some((sender) => !sender.reply.isClosed);
  }

  join(sender: Sender): void {
    this.senders.push(sender);
    sender.reply.begin();
    if (!sender.connection.elicits) return; // ASK4
    for (const question of this.questions.values()) {
      question.asked = sender.reply;
      sender.reply.send(question.request);
    }
  }

  progress(progress: number): void {
    const meta = this.newest.request.params?.["_meta"] as JsonObject | undefined;
    const progressToken = meta?.["progressToken"];
    if (progressToken === undefined || this.isOver) return;
    this.newest.reply.send(notification("notifications/progress", { progressToken, progress }));
  }

  /** Asks the client's user; rejects if it cannot be asked (ASK4). */
  async ask(params: JsonObject): Promise<JsonObject> {
    if (!this.newest.connection.elicits || this.newest.era === "modern") throw new Error("the client cannot be asked");
    const request: Request = { jsonrpc: "2.0", id: randomUUID(), method: "elicitation/create", params }; // ASK1
    const answered = await new Promise<Response | Error>((settle) => {
      this.questions.set(request.id as string, { request, asked: this.newest.reply, settle });
      this.newest.reply.send(request);
    });
    if (answered instanceof Error) throw answered;
    if (answered.result === undefined) throw new Error(`the client answered ${answered.error?.code}`);
    return answered.result;
  }

  /** SEC10: the first answer of the principal that was asked. Whether it was one of this run's questions. */
  takeAnswer(response: Response, credential: Credential): boolean {
    const question = this.questions.get(response.id as string);
    if (question === undefined || credential.principal !== this.newest.credential.principal) return false;
    this.questions.delete(response.id as string);
    question.settle(response);
    return true;
  }

  /** Answers everybody that can be reached (KEY5), once. */
  finish(outcome: Outcome): void {
    if (this.isOver) return;
    this.isOver = true;
    for (const [requestId, question] of this.questions) {
      question.asked.send(notification("notifications/cancelled", { requestId })); // ASK6
      question.settle(new Error("nobody waits for the answer")); // ASK6
    }
    this.questions.clear();
    this.whenOver(this);
    // Also where the way is cut: a response stream can be continued (HTL10).
    for (const sender of this.senders) sender.reply.answer(answer(sender.request.id, this.dress(outcome, sender)));
  }

  cancel(error: RpcError): void {
    this.finish(error.outcome);
    this.aborter.abort();
  }
}
