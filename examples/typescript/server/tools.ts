/** The fixture tools that conformance/README.md describes. */

import { beside, kinds } from "./beside.js";
import type { Run } from "./run.js";
import type { Service } from "./service.js";
import { invalidParams, isObject, notification, RpcError, type Json, type JsonObject } from "./wire.js";

type Arguments = JsonObject;
interface Call {
  service: Service;
  run: Run;
  get(key: string): Json | undefined;
  set(key: string, value: Json): void;
  /** On the standalone channel of the call's session or connection (EVT4). */
  emit(method: string, params: JsonObject): void;
}
type Tool = (call: Call, given: Arguments) => string | Promise<string>;

const HOLD_SECONDS = 10;
const tallies = new Map<string, number>();
const holds = new Map<string, { started: number; finished: number; cancelled: number; open: boolean; wake: Set<() => void> }>();

const text = (value: Json | undefined): string => (typeof value === "string" ? value : JSON.stringify(value ?? null));
const texts = (value: Json | undefined): string[] => (Array.isArray(value) ? value.map(text) : []);
const updated = (call: Call, uri: string): void => call.emit("notifications/resources/updated", { uri });
const failure = (message: string): RpcError => new RpcError(-32000, message);

function holdOf(label: string) {
  let hold = holds.get(label);
  if (hold === undefined) {
    hold = { started: 0, finished: 0, cancelled: 0, open: false, wake: new Set() };
    holds.set(label, hold);
  }
  return hold;
}

async function hold({ run }: Call, label: string): Promise<string> {
  const at = holdOf(label);
  at.started += 1;
  run.progress(1);
  if (!at.open) {
    await new Promise<void>((resolve) => {
      const wake = (): void => {
        at.wake.delete(wake);
        resolve();
      };
      at.wake.add(wake);
      run.signal.addEventListener("abort", wake);
      setTimeout(wake, HOLD_SECONDS * 1000).unref();
    });
  }
  at.open = false;
  if (run.signal.aborted) {
    at.cancelled += 1;
    return "cancelled";
  }
  run.progress(2);
  at.finished += 1;
  return "held";
}

const HANDLERS: Record<string, Tool> = {
  echo: (call, { msg }) => {
    call.set("calls", Number(call.get("calls") ?? 0) + 1);
    return text(msg);
  },
  remember: (call, { key, value, fail }) => {
    call.set(text(key), value ?? null);
    if (fail === true) throw failure("told to fail");
    return "remembered";
  },
  recall: (call, { key }) => {
    const value = call.get(text(key));
    return value === undefined ? "nothing" : text(value);
  },
  session_id: ({ run }) => run.session?.id ?? "none",
  members_only: () => "welcome",
  update: ({ service }, { uri, times }) => {
    for (let n = 0; n < Number(times ?? 1); n += 1) {
      service.registry.announce(notification("notifications/resources/updated", { uri: uri ?? null }));
    }
    return "updated";
  },
  announce: ({ service }, { kind }) => {
    service.registry.announce(notification(`notifications/${text(kind)}/list_changed`));
    return "announced";
  },
  emit: (call, { uris }) => {
    for (const uri of texts(uris)) updated(call, uri);
    return "emitted";
  },
  flood: (call, { prefix, count }) => {
    for (let n = 1; n <= Number(count); n += 1) updated(call, `${text(prefix)}${n}`);
    return "emitted";
  },
  say: (call, { texts: said, length }) => {
    for (const data of texts(said)) {
      call.emit("notifications/message", { level: "info", data: data.padEnd(Number(length ?? 0), ".") });
    }
    return "said";
  },
  progress: ({ run }, { steps }) => {
    for (let step = 1; step <= Number(steps); step += 1) run.progress(step);
    return "reported";
  },
  ask: async ({ run }, { question }) => {
    const requestedSchema = { type: "object", properties: { answer: { type: "string" } }, required: ["answer"] };
    const { action, content } = await run.ask({ message: text(question), requestedSchema });
    return `${text(action)}: ${isObject(content) ? text(content["answer"]) : ""}`;
  },
  tally: (_, { label, fail }) => {
    const count = (tallies.get(text(label)) ?? 0) + 1;
    tallies.set(text(label), count);
    if (fail === true) throw failure(String(count));
    return String(count);
  },
  hold: (call, { label }) => hold(call, text(label)),
  release: (_, { label }) => {
    const at = holdOf(text(label));
    if (at.wake.size === 0) at.open = true;
    [...at.wake].forEach((wake) => wake());
    return "released";
  },
  held: (_, { label }) => {
    const { started, finished, cancelled } = holdOf(text(label));
    return `${started} started, ${finished} finished, ${cancelled} cancelled`;
  },
  beside: (_, { kind }) => (kind === undefined ? kinds() : beside(text(kind))),
  drain: ({ service }) => {
    if (process.env["BESIDE"] !== "draining") throw new Error("others use this server");
    // It stays a little longer than what runs may take, for whoever asks what became of it.
    setImmediate(() => void service.drain().then(() => setTimeout(() => process.exit(0), 3000)));
    return "draining";
  },
  revoke: ({ service, run }, { session }) => {
    const found = service.registry.find(text(session), run.newest.credential);
    if (found !== null) service.registry.end(found);
    return "revoked";
  },
};

export const TOOLS: Json[] = Object.keys(HANDLERS).map((name) => ({ name, inputSchema: { type: "object" } }));

/** Calls a tool. An error that a handler throws as RpcError is the answer, any other a result that says so. */
export async function callTool(service: Service, run: Run, params: JsonObject): Promise<JsonObject> {
  const { session } = run;
  const handler = Object.hasOwn(HANDLERS, text(params["name"])) ? HANDLERS[text(params["name"])] : undefined;
  if (handler === undefined) throw invalidParams("unknown tool");
  const call: Call = {
    service,
    run,
    get: (key) => run.changes.get(key) ?? session?.get(key),
    set: (key, value) => void run.changes.set(key, value),
    emit: (method, told) => {
      if (session === null) run.newest.connection.push(notification(method, told)); // EVT6
      else if (!session.isEnded) session.store(notification(method, told)); // SES18
    },
  };
  try {
    const said = await handler(call, isObject(params["arguments"]) ? params["arguments"] : {});
    return { content: [{ type: "text", text: said }] };
  } catch (error) {
    if (error instanceof RpcError) throw error;
    return { content: [{ type: "text", text: String(error) }], isError: true };
  }
}
