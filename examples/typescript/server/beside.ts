/** Servers of another kind beside this one, for the fixture tool `beside`: processes of the same program. */

import { spawn } from "node:child_process";
import { once } from "node:events";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const MAIN = fileURLToPath(new URL("./main.js", import.meta.url));
const KINDS: Record<string, Record<string, string>> = {
  draining: { DRAIN: "3" },
  brief: { IDLE: "4", WINDOW_AGE: "1", UNHEARD: "2", SLOW: "1", WINDOW_EVENTS: "100000", WINDOW_BYTES: String(64 * 1024 * 1024) },
  stateless: { STATELESS: "1" },
};
const urls = new Map<string, Promise<string>>();

export const isBeside = process.env["BESIDE"] !== undefined;

export const kinds = (): string => Object.keys(KINDS).join(" ");

/** The URL of a server of that kind; another one for each call if it is to shut down. */
export function beside(kind: string): Promise<string> {
  let url = kind === "draining" ? undefined : urls.get(kind);
  if (url === undefined) {
    url = start(kind);
    urls.set(kind, url);
  }
  return url;
}

async function start(kind: string): Promise<string> {
  const settings = KINDS[kind];
  if (settings === undefined) throw new Error(`there is no kind ${kind}`);
  const env = { ...process.env, ...settings, BESIDE: kind };
  // Its input ends with this process, however that ends.
  const child = spawn(process.execPath, [MAIN, "0"], { env, stdio: ["pipe", "pipe", "inherit"] });
  const [line] = (await once(createInterface(child.stdout), "line")) as [string];
  return line;
}
