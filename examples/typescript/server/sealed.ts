/** Sessions of a server without a store: all that is known of one is in its id and in its token (SLS2, SLS3). */

import { createHmac, randomBytes, timingSafeEqual } from "node:crypto";
import type { Credential } from "./credentials.js";
import { LIMITS } from "./limits.js";
import { Session } from "./session.js";
import { invalidState, type Json } from "./wire.js";

const SECRET = randomBytes(32);

const sealOf = (...parts: Json[]): string => createHmac("sha256", SECRET).update(JSON.stringify(parts)).digest("base64url");

function isSeal(given: string, expected: string): boolean {
  return given.length === expected.length && timingSafeEqual(Buffer.from(given), Buffer.from(expected));
}

/** As long as one request of it is served. */
class SealedSession extends Session {
  constructor(credential: Credential, id: string, private readonly ends: number) {
    super(credential, id);
  }

  override isOver(now: number): boolean {
    return now >= this.ends * 1000;
  }

  override get expiresAt(): string {
    return new Date(this.ends * 1000).toISOString().replace(/\.[0-9]+Z$/, "Z");
  }

  override get token(): string {
    const text = Buffer.from(JSON.stringify([...this.values])).toString("base64url");
    return `${text}.${this.sealOf(text)}`;
  }

  override check(state: Json | undefined): void {
    if (state === undefined || state === null) return; // STT10: it begins with an empty one.
    const [text, seal, more] = typeof state === "string" && state.length <= 4096 ? state.split(".") : [];
    if (text === undefined || seal === undefined || more !== undefined || !isSeal(seal, this.sealOf(text))) throw invalidState();
    this.values = new Map(JSON.parse(Buffer.from(text, "base64url").toString()) as [string, Json][]);
  }

  private sealOf(text: string): string {
    return sealOf("state", this.id, this.credential.principal, text);
  }
}

/** An id that says when its session ends, and is good for one principal. */
export function makeSealed(credential: Credential): Session {
  const ends = Math.floor(Date.now() / 1000) + LIMITS.sealedSeconds;
  const told = `${randomBytes(32).toString("base64url")}.${ends}`; // SES4
  return new SealedSession(credential, `${told}.${sealOf("id", credential.principal, told)}`, ends);
}

/** The caller's session of that id, if it is one. */
export function openSealed(id: string, credential: Credential): Session | null {
  const [random, ends, seal, more] = id.split(".");
  if (random === undefined || ends === undefined || seal === undefined || more !== undefined) return null;
  if (!isSeal(seal, sealOf("id", credential.principal, `${random}.${ends}`))) return null;
  const session = new SealedSession(credential, id, Number(ends));
  return session.isOver(Date.now()) ? null : session;
}
