/** Who asks (SES8). Without tokens everyone is one principal (SEC1). */

import { RpcError } from "./wire.js";

export interface Credential {
  principal: string;
  scopes: ReadonlySet<string>;
  /** Milliseconds since 1970, or Infinity. */
  expires: number;
}

const NOBODY: Credential = { principal: "", scopes: new Set(), expires: Infinity };

export const covers = (has: Credential, needed: Credential): boolean =>
  [...needed.scopes].every((scope) => has.scopes.has(scope));

/** Read from TOKENS: {"token": {"subject": …, "issuer"?, "client"?, "scopes"?: […], "expires"?: seconds since 1970}}. */
export class Tokens {
  private readonly known: Map<string, Credential> | null;

  constructor(config: string | undefined) {
    if (config === undefined) {
      this.known = null;
      return;
    }
    this.known = new Map();
    for (const [token, told] of Object.entries(JSON.parse(config) as Record<string, Record<string, unknown>>)) {
      this.known.set(token, {
        principal: JSON.stringify([told["issuer"] ?? "", told["subject"], told["client"] ?? ""]),
        scopes: new Set((told["scopes"] as string[] | undefined) ?? []),
        expires: typeof told["expires"] === "number" ? told["expires"] * 1000 : Infinity,
      });
    }
  }

  get open(): boolean {
    return this.known === null;
  }

  /** The credential of an Authorization header, or null: answer 401. */
  ofHeader(header: string | undefined): Credential | null {
    const token = /^Bearer +(\S+)$/i.exec(header ?? "")?.[1];
    return this.of(token);
  }

  of(token: string | undefined): Credential | null {
    if (this.known === null) return NOBODY;
    const credential = token === undefined ? undefined : this.known.get(token);
    return credential === undefined || credential.expires <= Date.now() ? null : credential;
  }
}

export const unauthorized = (): RpcError => new RpcError(-32001, "Unauthorized");
