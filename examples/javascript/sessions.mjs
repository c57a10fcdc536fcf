// Sessions, their logs, and the connections that they are attached to. Nothing here knows HTTP.
//
// The ids in the comments are clauses of ../../spec.

import { randomBytes } from 'node:crypto';

export const SESSION = 'io.modelcontextprotocol/session'; // the member of `_meta` that names a session
export const EXTENSION = 'io.github.mcp-sessions/sessions';

export const WINDOW = { maxEvents: 100, maxBytes: 64 * 1024, maxAge: 3600 }; // maxAge in seconds
export const LIMITS = { sessions: 10_000, subscriptions: 50, requests: 100, message_bytes: 9_000_000 };
const LISTS = ['tools', 'prompts', 'resources'];
const IDLE = 1800 * 1000; // milliseconds until an idle session expires (SES13)

/** A JSON-RPC error. `status` is the HTTP status that it comes with (HTP2). */
export class Refusal extends Error {
  constructor(code, message, data, status = 200) {
    super(message);
    Object.assign(this, { code, data, status });
  }
}

export const notFound = (sessionId, started) => new Refusal(-32043, 'Session not found', { sessionId, ...started });
export const modeConflict = (status) =>
  new Refusal(-32600, 'Invalid request', { reason: 'mode_conflict' }, status);
export const invalidParams = (message) => new Refusal(-32602, message);

/** ERR6: whatever a client can make the server keep has a bound. */
export function within(limit, size) {
  if (size > LIMITS[limit]) throw new Refusal(-31011, 'Limit reached', { limit, max: LIMITS[limit] });
}

// 256 bits, and no caller has a say in it (SES4).
const newId = () => randomBytes(32).toString('base64url');

let newestEpoch = 0n;

/**
 * Numbered entries, of which the recent ones are kept. The events of a session are one log, and the messages of a
 * GET stream are another.
 *
 * A position is the number of the last entry that somebody has. It is good as long as no entry after it was dropped.
 */
class Log {
  constructor(maxAge = Infinity) {
    // Each log has an epoch of its own, and a newer log has a greater one. So an id of one log is never taken for a
    // position in another: not in another session's, and not on a stream (EVT8, HTL19).
    const now = BigInt(Date.now()) * 1_000_000n;
    newestEpoch = now > newestEpoch ? now : newestEpoch + 1n;
    Object.assign(this, { epoch: newestEpoch, maxAge, entries: [], bytes: 0 });
    this.head = 0; // the number of the newest entry
    this.floor = 0; // the oldest good position: the number of the last entry that was dropped
    this.evicted = 0; // the same, of the entries that were dropped for want of space
    this.evictedOwn = 0; // the same, of those of no session
  }

  id(number = this.head) {
    return `${this.epoch}-${String(number).padStart(12, '0')}`;
  }

  append(json, session) {
    this.head += 1;
    const bytes = Buffer.byteLength(json);
    this.entries.push({ number: this.head, json, session, bytes, time: Date.now() });
    this.bytes += bytes;
    this.dropOld();
    // The newest entry stays, however large it is (CUP18).
    while (this.entries.length > 1 && (this.entries.length > WINDOW.maxEvents || this.bytes > WINDOW.maxBytes)) {
      const dropped = this.drop();
      this.evicted = dropped.number;
      if (!dropped.session) this.evictedOwn = dropped.number;
    }
  }

  dropOld() {
    while (this.entries.length && this.entries[0].time < Date.now() - this.maxAge * 1000) this.drop();
  }

  drop() {
    const entry = this.entries.shift();
    this.bytes -= entry.bytes;
    this.floor = entry.number;
    return entry;
  }

  /** Takes the entries of a session out. That makes no hole: nobody may get them any more. */
  remove(session) {
    this.entries = this.entries.filter((entry) => entry.session !== session);
    this.bytes = this.entries.reduce((sum, entry) => sum + entry.bytes, 0);
  }

  /** Begins behind a hole: every position before is lost, and the one that it returns is good. */
  restart() {
    Object.assign(this, { entries: [], bytes: 0, head: this.head + 1, floor: this.head + 1 });
    return this.head;
  }

  /** The position with this id, or the reason why nothing can be sent from there: the first that holds (CUP8). */
  find(id) {
    this.dropOld();
    if (id === undefined) return { reason: 'no_position' };
    const match = /^(\d{19})-(\d{12})$/.exec(id);
    const [epoch, number] = match ? [BigInt(match[1]), Number(match[2])] : [];
    if (epoch === undefined || epoch > this.epoch) return { reason: 'unknown_position' };
    if (epoch < this.epoch) return { reason: 'log_replaced' };
    if (number > this.head) return { reason: 'ahead' };
    if (number < this.evicted) return { reason: 'evicted' };
    if (number < this.floor) return { reason: 'expired' };
    return { position: number };
  }
}

/** A protocol-mode session. It outlives every connection. */
class Session {
  constructor(principal) {
    Object.assign(this, { id: newId(), principal, log: new Log(WINDOW.maxAge), ended: false });
    this.subscriptions = new Set(); // they outlive the connection, too (EVT13, RES14)
    this.connection = null; // the one connection that gets its events, if any (RES3)
    this.displacements = 0; // how often a connection lost it to another, or lost its place (TKO5)
    this.calls = new Set(); // the requests that run
    this.values = new Map(); // what tools keep in the session
    this.touch();
  }

  /** Idle time counts from the end of the last request. No event moves the deadline, and no notification (SES14). */
  touch() {
    this.lastUsed = Date.now();
  }

  get gone() {
    return this.ended || (this.calls.size === 0 && Date.now() >= this.lastUsed + IDLE);
  }

  /** Cut to the second, so that it is never later than the truth (SES16). */
  get expiresAt() {
    return new Date(this.lastUsed + IDLE).toISOString().replace(/\.\d+Z$/, 'Z');
  }

  /** What the result of a request has that named this session (ASC12). A server of this level keeps no `state`. */
  get metadata() {
    return { sessionId: this.id, expiresAt: this.expiresAt, state: '' };
  }

  /** Stores an event, and only then sends it (EVT10). While the session is attached nowhere, it waits in the log. */
  emit(method, params = {}) {
    if (this.gone) return; // END3, SES18
    const _meta = { ...params._meta, [SESSION]: { sessionId: this.id } };
    const sessionEventId = this.log.id(this.log.head + 1);
    const json = JSON.stringify({ jsonrpc: '2.0', method, params: { ...params, _meta, sessionEventId } });
    this.log.append(json);
    this.connection?.push(json, this);
  }
}

/**
 * A transport-mode session: all its POSTs and its GET stream together (ASC7). It outlives its streams (HTL2).
 *
 * Every message for the GET stream goes through the outbox, which keeps the sent ones for `Last-Event-ID` as well.
 */
class Connection {
  constructor(principal, { version, declared }) {
    // `declared`: whether the client declared this extension (CAP4).
    Object.assign(this, { id: newId(), principal, version, declared, ended: false });
    this.current = null; // {session, displacements}: the current session, as it was when it became that (ASC5)
    this.sessions = new Set(); // those that are attached here
    this.subscriptions = new Set(); // those outside of any session
    this.calls = new Set();
    this.outbox = new Log();
    this.stream = null;
    this.opened = false; // whether there was a GET
    this.cursor = 0; // the number of the last message that the stream was handed
    this.handed = 0; // the same, for all streams so far
    this.touch();
  }

  touch() {
    this.lastUsed = Date.now();
  }

  get gone() {
    return this.ended || (this.calls.size === 0 && !this.stream && Date.now() >= this.lastUsed + IDLE);
  }

  setCurrent(session) {
    this.current = session && { session, displacements: session.displacements };
  }

  /** Whether another connection has the current session, or had it since (TKO5). */
  get displaced() {
    return this.current !== null && this.current.displacements !== this.current.session.displacements;
  }

  /** Lets go of a session and of all its messages that wait here: the next connection sends them (TKO1). */
  release(session) {
    this.outbox.remove(session);
    this.sessions.delete(session);
    session.connection = null;
    // What the stream still buffers cannot be taken back. The client continues with Last-Event-ID.
    if (this.stream?.behind) this.closeStream();
  }

  push(json, session = null) {
    this.outbox.append(json, session);
    this.pump();
  }

  /** Hands the stream what it was not handed yet, one by one and in order (ATT4, ATT6). */
  pump() {
    while (this.stream && !this.stream.full) {
      if (this.cursor < this.outbox.floor) return this.closeStream(); // never skip a hole (ATT10)
      const entry = this.outbox.entries.find(({ number }) => number > this.cursor);
      if (!entry) return;
      this.cursor = entry.number;
      this.handed = Math.max(this.handed, this.cursor);
      this.stream.send(entry.json, this.outbox.id(entry.number));
    }
  }

  closeStream() {
    const { stream } = this;
    this.stream = null;
    stream?.close();
  }

  /** Serves a GET. */
  open(stream, lastEventId) {
    this.closeStream(); // HTL8
    let { position, reason } = this.outbox.find(lastEventId); // HTL4
    let lost = reason !== undefined;
    if (lastEventId === undefined && !this.opened) {
      position = 0; // the first GET gets everything since initialize (HTL3)
      lost = this.outbox.floor > 0;
    } else if (lastEventId === undefined) {
      // Only the client knows what the earlier stream brought. It says so in session/resume (HTL7).
      for (const session of this.sessions) this.release(session);
      position = this.handed;
      lost = this.outbox.evictedOwn > this.handed;
    }
    Object.assign(this, { stream, opened: true });
    this.cursor = lost ? this.sayWhatToRead() : position;
    this.handed = Math.max(this.handed, this.cursor);
    // Older clients would read the empty data as a message (HTL12).
    if (this.version >= '2025-11-25') stream.send('', this.outbox.id(this.cursor));
    this.pump();
  }

  /** The opening messages of a stream whose position is lost. Returns its new position (HTL9). */
  sayWhatToRead() {
    const messages = [];
    for (const session of this.sessions) {
      this.release(session);
      session.displacements += 1;
      const params = { sessionId: session.id, reason: 'evicted' };
      if (this.declared) messages.push({ method: 'notifications/sessions/detached', params });
    }
    for (const uri of this.subscriptions) messages.push({ method: 'notifications/resources/updated', params: { uri } });
    for (const list of LISTS) messages.push({ method: `notifications/${list}/list_changed` });
    const position = this.outbox.restart();
    // Only the last one has an id: a client that is cut before comes back with its old position.
    messages.forEach((message, i) => {
      const id = i === messages.length - 1 ? this.outbox.id(position) : undefined;
      this.stream.send(JSON.stringify({ jsonrpc: '2.0', ...message }), id);
    });
    return position;
  }
}

/** All sessions and connections of the server. JavaScript runs each of these functions as one step (RES5). */
export class Sessions {
  sessions = new Map();
  connections = new Map();

  makeRoom() {
    this.sweep();
    within('sessions', this.sessions.size + this.connections.size + 1);
  }

  connect(principal, client) {
    this.makeRoom();
    const connection = new Connection(principal, client);
    this.connections.set(connection.id, connection);
    return connection;
  }

  /** The caller's connection or session with this id. A foreign one is as one that never was (SES8, ERR2). */
  connection(id, principal) {
    return this.#own(this.connections, id, principal);
  }

  session(id, principal) {
    const session = this.#own(this.sessions, id, principal);
    if (session) return session;
    if (this.connection(id, principal)) throw modeConflict(); // SES11
    throw notFound(id);
  }

  has(id, principal) {
    return this.#own(this.sessions, id, principal) !== undefined;
  }

  #own(map, id, principal) {
    const found = map.get(id);
    return found && !found.gone && found.principal === principal ? found : undefined;
  }

  start(connection) {
    this.makeRoom();
    const session = new Session(connection.principal);
    this.sessions.set(session.id, session);
    this.#attach(session, connection); // ATT2
    return session;
  }

  /** Attaches the session. Returns the result, and a function that sends the replay after the result (RES6). */
  resume(session, connection, lastSessionEventId) {
    this.#attach(session, connection);
    const { position, reason } = session.log.find(lastSessionEventId);
    const replay = reason ? [] : session.log.entries.filter(({ number }) => number > position); // CUP3, CUP5
    session.touch();
    const { expiresAt, log } = session;
    const [catchup, replayed] = [!reason, replay.length];
    const result = { resumed: true, catchup, sessionEventId: log.id(), replayed, expiresAt, reason }; // RES4
    return { result, sendReplay: () => replay.forEach(({ json }) => connection.push(json, session)) };
  }

  #attach(session, connection) {
    // On the connection that has it already, nobody is displaced (RES8). Messages that wait there come as replay.
    if (session.connection !== connection) session.displacements += 1;
    session.connection?.release(session);
    session.connection = connection;
    connection.sessions.add(session);
    connection.setCurrent(session); // ASC5
  }

  end(session) {
    session.ended = true;
    this.sessions.delete(session.id);
    session.connection?.release(session); // END3
    for (const call of session.calls) call.cancel(notFound(call.sessionName, { started: true })); // END6
  }

  /** The end of a connection ends no session (ATT9, HTL17). */
  disconnect(connection) {
    connection.ended = true;
    this.connections.delete(connection.id);
    for (const session of connection.sessions) connection.release(session);
    for (const call of connection.calls) if (!call.session) call.cancel(new Refusal(-32603, 'Connection ended'));
    connection.closeStream();
  }

  sweep() {
    for (const session of this.sessions.values()) if (session.gone) this.end(session);
    for (const connection of this.connections.values()) if (connection.gone) this.disconnect(connection);
  }

  /** A change that concerns everybody: an update of a resource, or of a list if there is no `uri`. */
  announce(method, uri) {
    const params = uri === undefined ? {} : { uri };
    for (const session of this.sessions.values()) {
      if (uri === undefined || session.subscriptions.has(uri)) session.emit(method, params); // EVT1
    }
    const json = JSON.stringify({ jsonrpc: '2.0', method, params });
    for (const connection of this.connections.values()) {
      // Of what its sessions get, a connection gets no further copy (EVT11).
      const entitled = uri === undefined ? connection.sessions.size === 0 : connection.subscriptions.has(uri);
      if (entitled) connection.push(json);
    }
  }
}
