/** The request keys of one session: what is known, what still runs, which answers are kept (KEY). */

import { createHash } from "node:crypto";
import { covers, type Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import type { Run } from "./run.js";
import { byteLength, canonical, invalidRequest, limitReached, outcomeUnknown, type Outcome, type Request } from "./wire.js";

interface Known {
  content: string;
  credential: Credential;
  /** Still running, or what came of it; `null`: nobody knows (KEY11). */
  state: Run | Outcome | null;
  finished: number | null;
  bytes: number;
}

/** KEY8: method and params without _meta. */
export function contentOf(request: Request): string {
  const { _meta: _, ...params } = request.params ?? {};
  return createHash("sha256").update(canonical([request.method, params])).digest("base64");
}

const DIGEST_BYTES = 32;

export class KeyStore {
  private readonly known = new Map<string, Known>();

  /** What is known of the key: `null` if it is new and there is room for it. Throws KEY8, KEY11, KEY13, KEY18. */
  look(key: string, request: Request, credential: Credential): Run | Outcome | null {
    this.forget();
    const record = this.known.get(key);
    if (record === undefined) {
      let keys = this.sizeOf(key);
      for (const name of this.known.keys()) keys += this.sizeOf(name);
      if (keys > LIMITS.keyBytes) throw limitReached("request_key_bytes");
      return null;
    }
    if (record.content !== contentOf(request)) throw invalidRequest("this request key was used with other content", "key_reused");
    if (!covers(credential, record.credential) || record.state === null) throw outcomeUnknown();
    return record.state;
  }

  /** KEY2: before anything happens. */
  begin(key: string, request: Request, credential: Credential, run: Run): void {
    this.known.set(key, { content: contentOf(request), credential, state: run, finished: null, bytes: 0 });
    this.makeRoom();
  }

  /** KEY4 and KEY10; an outcome of null is one that nobody knows. */
  finish(key: string, outcome: Outcome | null): void {
    const record = this.known.get(key);
    if (record === undefined) return;
    // Finished last, dropped last.
    this.known.delete(key);
    this.known.set(key, record);
    record.state = outcome;
    record.finished = Date.now();
    record.bytes = outcome === null ? 0 : byteLength(outcome);
    this.makeRoom();
  }

  running(key: string): Run | null {
    const state = this.known.get(key)?.state;
    return state !== null && state !== undefined && "senders" in state ? state : null;
  }

  private sizeOf(key: string): number {
    return Buffer.byteLength(key) + DIGEST_BYTES;
  }

  // KEY12: answers go, oldest first, and their keys stay.
  private makeRoom(): void {
    let total = 0;
    for (const [key, record] of this.known) total += this.sizeOf(key) + record.bytes;
    for (const record of this.known.values()) {
      if (total <= LIMITS.keyBytes) return;
      if (record.bytes === 0) continue;
      total -= record.bytes;
      record.bytes = 0;
      record.state = null;
    }
  }

  private forget(): void {
    const before = Date.now() - LIMITS.keyLifetime * 1000;
    for (const [key, record] of this.known) {
      if (record.finished !== null && record.finished < before) this.known.delete(key);
    }
  }
}
