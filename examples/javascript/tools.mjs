// The fixture tools of ../../conformance/README.md, as far as the level `resume` needs them.

import { Refusal } from './sessions.mjs';

const holds = new Map(); // label -> {released, waiting, started, finished, cancelled}

function labelled(label) {
  const counts = { started: 0, finished: 0, cancelled: 0 };
  if (!holds.has(label)) holds.set(label, { released: false, waiting: new Set(), ...counts });
  if (holds.size > 1000) holds.delete(holds.keys().next().value);
  return holds.get(label);
}

function tool(properties, required, call) {
  return { inputSchema: { type: 'object', properties, required }, call };
}

const text = { type: 'string' };
const number = { type: 'integer' };
const texts = { type: 'array', items: text };
const UPDATED = 'notifications/resources/updated';

export const resources = [{ uri: 'conformance://resource/first', name: 'first' }];
export const prompts = [{ name: 'hello' }];

export const tools = {
  echo: tool({ msg: text }, ['msg'], ({ msg }) => msg),

  remember: tool({ key: text, value: text, fail: { type: 'boolean' } }, ['key', 'value'], (args, { session }) => {
    if (session && session.values.size < 100) session.values.set(args.key, args.value);
    if (args.fail) throw new Refusal(-32000, 'failed');
    return 'remembered';
  }),

  recall: tool({ key: text }, ['key'], ({ key }, { session }) => session?.values.get(key) ?? 'nothing'),

  session_id: tool({}, [], (args, { session }) => session?.id ?? 'none'),

  update: tool({ uri: text, times: number }, ['uri'], ({ uri, times = 1 }, call, sessions) => {
    for (let i = 0; i < times; i += 1) sessions.announce(UPDATED, uri);
    return 'updated';
  }),

  announce: tool({ kind: text }, ['kind'], ({ kind }, call, sessions) => {
    sessions.announce(`notifications/${kind}/list_changed`);
    return 'announced';
  }),

  emit: tool({ uris: texts }, ['uris'], ({ uris }, call) => {
    for (const uri of uris) call.emit(UPDATED, { uri });
    return 'emitted';
  }),

  flood: tool({ prefix: text, count: number }, ['prefix', 'count'], ({ prefix, count }, call) => {
    for (let i = 1; i <= count; i += 1) call.emit(UPDATED, { uri: `${prefix}${i}` });
    return 'flooded';
  }),

  say: tool({ texts, length: number }, ['texts'], ({ texts: said, length = 0 }, call) => {
    for (const data of said) call.emit('notifications/message', { level: 'info', data: data.padEnd(length, '.') });
    return 'said';
  }),

  progress: tool({ steps: number }, ['steps'], ({ steps }, call) => {
    for (let i = 1; i <= steps; i += 1) call.progress(i);
    return 'reported';
  }),

  hold: tool({ label: text }, ['label'], async ({ label }, call) => {
    const hold = labelled(label);
    hold.started += 1;
    call.progress(1);
    if (!hold.released) {
      await new Promise((resolve, reject) => {
        const timer = setTimeout(() => reject(new Error('not released')), 10_000);
        call.abort.signal.addEventListener('abort', () => {
          hold.cancelled += 1;
          reject(new Error('cancelled'));
        });
        hold.waiting.add(() => resolve(clearTimeout(timer)));
      });
    }
    call.progress(2);
    hold.finished += 1;
    return 'held';
  }),

  release: tool({ label: text }, ['label'], ({ label }) => {
    const hold = labelled(label);
    hold.released = true;
    for (const resolve of hold.waiting) resolve();
    return 'released';
  }),

  held: tool({ label: text }, ['label'], ({ label }) => {
    const { started, finished, cancelled } = labelled(label);
    return `${started} started, ${finished} finished, ${cancelled} cancelled`;
  }),

  revoke: tool({ session: text }, ['session'], ({ session: id }, call, sessions) => {
    const session = sessions.sessions.get(id);
    if (session) sessions.end(session);
    return 'revoked';
  }),
};
