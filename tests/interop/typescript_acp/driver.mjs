// Drives an agent with the stock TypeScript ACP client, once from start to end.
//
// stdin: {"command": [...], "cwd": "...", "steps": [["session/new", {...}], ...]}, one object.
// In the params of a step "$session" stands for the sessionId of the last session/new.
// stdout: {"answers": [...], "updates": [...]}: what each step answered (or {"error": ...}), and
// every session/update that the client was given, in order. The agent is killed at the end.

import { spawn } from "node:child_process";
import { once } from "node:events";
import { Readable, Writable } from "node:stream";
import { text } from "node:stream/consumers";
import * as acp from "@agentclientprotocol/sdk";

const { command, cwd, steps } = JSON.parse(await text(process.stdin));
const [program, ...args] = command;
const agent = spawn(program, args, { cwd, stdio: ["pipe", "pipe", "inherit"] });

const answers = [];
const updates = [];
let session;

function filled(params) {
  return JSON.parse(JSON.stringify(params).replaceAll('"$session"', JSON.stringify(session)));
}

const stream = acp.ndJsonStream(Writable.toWeb(agent.stdin), Readable.toWeb(agent.stdout));
await acp
  .client({ name: "interop" })
  .onNotification(acp.methods.client.session.update, ({ params }) => {
    updates.push(params.update);
  })
  .connectWith(stream, async (context) => {
    for (const [method, params] of steps) {
      try {
        const answer = await context.request(method, filled(params));
        answers.push(answer ?? null);
        session = answer?.sessionId ?? session;
      } catch (error) {
        answers.push({ error: { code: error.code, message: error.message, data: error.data } });
      }
    }
    agent.kill("SIGKILL");
  });
if (agent.exitCode === null && agent.signalCode === null) {
  await once(agent, "exit");
}
process.stdout.write(JSON.stringify({ answers, updates }) + "\n");
