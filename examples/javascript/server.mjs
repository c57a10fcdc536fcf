// An MCP server over Streamable HTTP of the handshake era, with the level `resume` of the sessions extension.
//
//     node server.mjs [PORT]
//
// TOKENS='{"token1": {"subject": "alice"}}' asks for a bearer token. Without it, everyone is one principal (SEC1).

import http from 'node:http';
import { EXTENSION, LIMITS, SESSION, WINDOW, Sessions } from './sessions.mjs';
import { Refusal, invalidParams, modeConflict, notFound, within } from './sessions.mjs';
import { prompts, resources, tools } from './tools.mjs';

const VERSIONS = ['2025-11-25', '2025-06-18', '2025-03-26'];
const BUFFER = 1024 * 1024; // bytes that wait in memory for one response (ATT7)
const STALLED = 30 * 1000; // milliseconds in which a peer takes nothing of a full buffer
const TOKENS = new Map(Object.entries(JSON.parse(process.env.TOKENS ?? '{}')));

const FEATURES = ['start', 'resume', 'end'];
const CAPABILITIES = {
  tools: { listChanged: true },
  prompts: { listChanged: true },
  resources: { listChanged: true, subscribe: true },
  logging: {},
  sessions: {}, // CAP1
  extensions: {
    [EXTENSION]: { window: WINDOW, transports: ['streamable-http'], features: FEATURES, level: 'resume' }, // CAP3, CAP5
  },
};

const sessions = new Sessions();
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);

/** A response that is a stream of server-sent events. */
class Stream {
  constructor(res) {
    this.res = res;
    this.behind = false; // whether something waits that the peer has not taken yet
    res.writeHead(200, { 'Content-Type': 'text/event-stream', 'Cache-Control': 'no-cache' });
    res.flushHeaders();
    res.on('drain', () => {
      this.behind = false;
      res.socket?.setTimeout(0);
      this.onDrain?.();
    });
  }

  get full() {
    return this.res.writableLength > BUFFER;
  }

  send(json, id) {
    this.behind = !this.res.write(`${id === undefined ? '' : `id: ${id}\n`}data: ${json}\n\n`);
    // The timeout of a socket begins again whenever its peer takes something, and in the end destroys it (ATT7).
    if (this.full) this.res.socket?.setTimeout(STALLED);
  }

  close() {
    if (this.behind) this.res.destroy();
    else this.res.end();
  }
}

/** A request that runs. */
class Call {
  constructor(message, connection, context, res) {
    Object.assign(this, { id: message.id, params: message.params ?? {}, connection, res });
    Object.assign(this, { session: context.session, named: context.named, sessionName: context.session?.id });
    this.abort = new AbortController();
    connection.calls.add(this);
    this.session?.calls.add(this);
  }

  /** Whether the client can still get the answer. */
  get open() {
    return !this.done && !this.res.destroyed;
  }

  /** Sends a notification to whoever sent the request. It is no event of the session (EVT5). */
  notify(method, params) {
    if (!this.open) return;
    this.stream ??= new Stream(this.res);
    if (this.stream.full) this.res.destroy();
    else this.stream.send(JSON.stringify({ jsonrpc: '2.0', method, params }));
  }

  progress(progress) {
    const progressToken = this.params._meta?.progressToken;
    if (progressToken !== undefined) this.notify('notifications/progress', { progressToken, progress });
  }

  /** Sends a notification outside of the request: an event of its session, or a message of its connection (EVT4). */
  emit(method, params) {
    if (this.session) this.session.emit(method, params);
    else if (!this.connection.gone) this.connection.push(JSON.stringify({ jsonrpc: '2.0', method, params }));
  }

  finish(outcome) {
    if (this.done) return;
    this.connection.calls.delete(this);
    this.session?.calls.delete(this);
    this.connection.touch();
    this.session?.touch();
    // A request by rule 2 gets its result as it is (ASC12).
    if (outcome.result && this.named) {
      outcome.result = { ...outcome.result, _meta: { ...outcome.result._meta, [SESSION]: this.session.metadata } };
    }
    if (this.open && this.stream) {
      this.stream.send(JSON.stringify({ jsonrpc: '2.0', id: this.id, ...outcome }));
      this.res.end();
    } else if (this.open) {
      reply(this.res, this.id, outcome);
    }
    this.done = true;
  }

  fail(error) {
    if (!(error instanceof Refusal)) console.error(error);
    const { code, message, data } = error instanceof Refusal ? error : new Refusal(-32603, 'Internal error');
    this.finish({ error: { code, message, data } });
  }

  cancel(refusal) {
    this.fail(refusal);
    this.abort.abort();
  }
}

function reply(res, id, outcome, status = 200, headers = {}) {
  const type = { 'Content-Type': 'application/json' };
  res.writeHead(status, { ...type, ...headers }).end(JSON.stringify({ jsonrpc: '2.0', id, ...outcome }));
}

/** The session of a request, and whether the request names it (rule 1), or null for no session. */
function contextOf(message, connection, principal) {
  const none = { session: null, named: false };
  const named = message.params?._meta?.[SESSION];
  const { current } = connection ?? {};
  if (named !== undefined && named !== null) {
    if (!isObject(named) || typeof named.sessionId !== 'string') throw invalidParams('Malformed session'); // ASC10
    return { session: sessions.session(named.sessionId, principal), named: true }; // rule 1 (ASC1)
  }
  if (!current) return none; // rule 3 (SES3)
  const refusal = current.session.gone
    ? notFound(current.session.id) // ASC17
    : connection.displaced && new Refusal(-31010, 'Session detached'); // TKO5
  if (named === null) {
    if (refusal) connection.setCurrent(null); // the way out (ASC4)
    return none;
  }
  if (message.method === 'ping' && refusal) return none; // TKO6
  if (refusal) throw refusal;
  return { session: current.session, named: false }; // rule 2 (ASC2)
}

/** `session/start`, `session/resume` and `session/end` take no session from `_meta` (STA5, RES13). */
const sessionMethods = {
  'session/start'({ connection }) {
    const { id, expiresAt, log } = sessions.start(connection);
    return { result: { sessionId: id, sessionEventId: log.id(), expiresAt } }; // STA3
  },

  'session/resume'({ connection, principal, params, headers }) {
    const { sessionId, lastSessionEventId: position } = params;
    if (typeof sessionId !== 'string') throw invalidParams('sessionId must be a string');
    if (position !== undefined && typeof position !== 'string') {
      throw invalidParams('lastSessionEventId must be a string');
    }
    if (sessionId === connection.id) throw modeConflict(400); // RES10
    const session = sessions.session(sessionId, principal);
    if ('last-event-id' in headers) throw modeConflict(); // RES10
    return sessions.resume(session, connection, position);
  },

  'session/end'({ connection, principal, params }) {
    if (typeof params.sessionId !== 'string') throw invalidParams('sessionId must be a string');
    const session = sessions.session(params.sessionId, principal);
    sessions.end(session);
    // Whoever ends its own current session knows that it has none (ASC17).
    if (connection.current?.session === session) connection.setCurrent(null);
    return { result: {} };
  },
};

const methods = {
  ping: () => ({}),
  'logging/setLevel': () => ({}),
  'tools/list': () => ({ tools: Object.entries(tools).map(([name, { call, ...tool }]) => ({ name, ...tool })) }),
  'resources/list': () => ({ resources }),
  'prompts/list': () => ({ prompts }),
  'prompts/get': () => ({ messages: [{ role: 'user', content: { type: 'text', text: 'Hello' } }] }),
  'resources/read': ({ params: { uri } }) => ({ contents: [{ uri, text: 'text' }] }),

  async 'tools/call'(call) {
    const { name, arguments: args = {} } = call.params;
    if (!Object.hasOwn(tools, name)) throw invalidParams('Unknown tool');
    const content = (text) => [{ type: 'text', text: String(text) }];
    try {
      return { content: content(await tools[name].call(args, call, sessions)), isError: false };
    } catch (error) {
      if (error instanceof Refusal) throw error;
      return { content: content(error.message), isError: true };
    }
  },

  // Subscriptions belong to the session, or else to the connection (EVT13).
  'resources/subscribe'({ params: { uri }, session, connection }) {
    if (typeof uri !== 'string') throw invalidParams('uri must be a string');
    const { subscriptions } = session ?? connection;
    if (!subscriptions.has(uri)) within('subscriptions', subscriptions.size + 1);
    subscriptions.add(uri);
    return {};
  },

  'resources/unsubscribe'({ params: { uri }, session, connection }) {
    (session ?? connection).subscriptions.delete(uri);
    return {};
  },
};

function initialize(message, res, principal) {
  const { protocolVersion, capabilities = {} } = message.params ?? {};
  if (typeof protocolVersion !== 'string') throw invalidParams('protocolVersion must be a string');
  const version = VERSIONS.includes(protocolVersion) ? protocolVersion : VERSIONS[0];
  const declared = capabilities.extensions?.[EXTENSION] ?? capabilities.experimental?.['experimental/sessions'];
  const { session, named } = contextOf(message, undefined, principal);
  const connection = sessions.connect(principal, { version, declared });
  const result = {
    protocolVersion: version,
    capabilities: CAPABILITIES,
    serverInfo: { name: 'javascript-example', version: '0.1.0' },
    ...(named && { _meta: { [SESSION]: session.metadata } }),
  };
  reply(res, message.id, { result }, 200, { 'Mcp-Session-Id': connection.id }); // HTL1
}

async function serve(message, connection, principal, req, res) {
  const { method, params } = message;
  if (params !== undefined && !isObject(params)) throw invalidParams('params must be an object');
  if (method === 'initialize') return initialize(message, res, principal);
  if (Object.hasOwn(sessionMethods, method)) {
    const request = { connection, principal, params: params ?? {}, headers: req.headers };
    const { result, sendReplay } = sessionMethods[method](request);
    reply(res, message.id, { result });
    return sendReplay?.();
  }
  if (/^sessions?\//.test(method)) throw new Refusal(-32601, 'Method not found'); // CAP3
  const context = contextOf(message, connection, principal);
  if (!Object.hasOwn(methods, method)) throw new Refusal(-32601, 'Method not found');
  within('requests', connection.calls.size + 1);
  const call = new Call(message, connection, context, res);
  try {
    call.finish({ result: await methods[method](call) });
  } catch (error) {
    call.fail(error);
  }
}

/** A cancellation reaches requests of its own connection: those whose response is open, or else the newest (REQ3). */
function cancelled(message, connection, principal) {
  try {
    if ((message.params?._meta?.[SESSION] ?? null) !== null) contextOf(message, connection, principal);
  } catch {
    return; // It names a session that is not there, so it has no effect (ASC10).
  }
  const calls = [...connection.calls].filter(({ id }) => id === message.params?.requestId);
  const open = calls.filter((call) => call.open);
  for (const call of open.length ? open : calls.slice(-1)) call.cancel(new Refusal(-32603, 'Request cancelled'));
}

/** SEC9: a server on a loopback address is for programs of this machine, and not for pages of the web. */
function checkOrigin({ headers: { host, origin }, socket }) {
  const isOurs = (authority, defaultPorts) => {
    const [, name, port] = /^(localhost|127\.0\.0\.1|\[::1\])(?::(\d+))?$/i.exec(authority) ?? [];
    return name !== undefined && (port ? [Number(port)] : defaultPorts).includes(socket.localPort);
  };
  if (!isOurs(host, [80, 443])) throw new Refusal(-32600, 'Wrong host', undefined, 421);
  if (origin === undefined) return;
  const [, scheme, authority] = /^(https?):\/\/(.*)$/i.exec(origin) ?? [];
  if (!isOurs(authority, [scheme?.toLowerCase() === 'https' ? 443 : 80])) {
    throw new Refusal(-32600, 'Wrong origin', undefined, 403);
  }
}

function principalOf({ headers }) {
  if (TOKENS.size === 0) return '';
  const credential = TOKENS.get(/^bearer +(\S+)$/i.exec(headers.authorization)?.[1]);
  if (!credential) throw new Refusal(-32600, 'Unauthorized', undefined, 401);
  return credential.subject; // whatever its scopes are (SES8)
}

/** The connection that `Mcp-Session-Id` names, whatever session the message names (HTL16). */
function connectionOf({ headers }, principal) {
  const id = headers['mcp-session-id'];
  if (id === undefined) throw new Refusal(-32600, 'Mcp-Session-Id is missing', undefined, 400); // HTL18
  if (sessions.has(id, principal)) throw modeConflict(400); // HTL14
  const connection = sessions.connection(id, principal);
  if (!connection) throw new Refusal(-32600, 'Not found', undefined, 404); // HTL13
  connection.touch();
  return connection;
}

/** The message in the body; undefined if there is none. */
async function read(req) {
  const chunks = [];
  let size = 0;
  for await (const chunk of req) {
    size += chunk.length;
    if (size < LIMITS.message_bytes) chunks.push(chunk);
  }
  within('message_bytes', size + 1);
  try {
    return JSON.parse(Buffer.concat(chunks));
  } catch {
    return undefined;
  }
}

async function post(req, res, principal) {
  const message = await read(req);
  const isId = typeof message?.id === 'string' || typeof message?.id === 'number';
  if (isId) res.requestId = message.id;
  const isFirst = message?.method === 'initialize' && req.headers['mcp-session-id'] === undefined;
  const connection = isFirst ? undefined : connectionOf(req, principal);
  if (message === undefined) throw new Refusal(-32700, 'Parse error', undefined, 400);
  const isResponse = isId && ('result' in message || 'error' in message);
  const isNotification = typeof message?.method === 'string' && !('id' in message);
  if (message?.jsonrpc !== '2.0' || !(isResponse || isNotification || (isId && typeof message.method === 'string'))) {
    throw new Refusal(-32600, 'Invalid request', undefined, 400);
  }
  if (!isResponse && !isNotification) return serve(message, connection, principal, req, res);
  if (message.method === 'notifications/cancelled' && connection) cancelled(message, connection, principal);
  res.writeHead(202).end();
}

function get(req, res, principal) {
  const connection = connectionOf(req, principal);
  const stream = new Stream(res);
  stream.onDrain = () => connection.pump();
  // The late end of an older stream changes nothing (TKO9).
  res.on('close', () => {
    if (connection.stream === stream) connection.closeStream();
    connection.touch();
  });
  connection.open(stream, req.headers['last-event-id']);
}

function del(req, res, principal) {
  sessions.disconnect(connectionOf(req, principal)); // HTL17
  res.writeHead(204).end();
}

const server = http.createServer(async (req, res) => {
  try {
    checkOrigin(req);
    const principal = principalOf(req);
    const handler = { POST: post, GET: get, DELETE: del }[req.method];
    if (req.url.split('?')[0] !== '/mcp') throw new Refusal(-32600, 'Not found', undefined, 404);
    if (!handler) throw new Refusal(-32600, 'Method not allowed', undefined, 405);
    const version = req.headers['mcp-protocol-version'] ?? VERSIONS[0];
    if (!VERSIONS.includes(version)) {
      throw new Refusal(-32022, 'Unsupported protocol version', { supported: VERSIONS, requested: version }, 400);
    }
    await handler(req, res, principal);
  } catch (error) {
    const refusal = error instanceof Refusal ? error : new Refusal(-32603, 'Internal error', undefined, 500);
    if (refusal !== error) console.error(error);
    if (res.headersSent) return res.destroy();
    const { code, message, data, status } = refusal;
    const headers = { 401: { 'WWW-Authenticate': 'Bearer' }, 405: { Allow: 'GET, POST, DELETE' } }[status];
    reply(res, res.requestId ?? null, { error: { code, message, data } }, status, headers);
  }
});

setInterval(() => {
  sessions.sweep();
  // A comment shows whether the client of a silent stream is still there.
  for (const { stream } of sessions.connections.values()) if (stream && !stream.behind) stream.res.write(':\n\n');
}, 15_000).unref();

server.keepAliveTimeout = 60_000;
server.listen(Number(process.argv[2] ?? 8000), '127.0.0.1', () => {
  console.log(`http://127.0.0.1:${server.address().port}/mcp`);
});
