/** session/* of the elevation document and sessions/* of the data-layer document. */

import { attach, displace } from "./connection.js";
import { covers } from "./credentials.js";
import { IS_STATELESS } from "./limits.js";
import type { Reason } from "./log.js";
import type { Reply } from "./run.js";
import type { Caller, Service } from "./service.js";
import { namedSession } from "./service.js";
import type { Session } from "./session.js";
import {
  answer, HEAD, INSTANCE, invalidParams, metaOf, methodNotFound, SESSION, sessionNotFound,
  type JsonObject, type Request,
} from "./wire.js";

const METHODS = ["session/start", "session/resume", "session/end", "sessions/create", "sessions/delete"];

export const isSessionMethod = (method: string): boolean => METHODS.includes(method);

export function callSessionMethod(service: Service, request: Request, caller: Caller, reply: Reply): void {
  const respond = (result: JsonObject): void => {
    const typed = caller.era === "modern" ? { ...result, resultType: "complete" } : result; // HTM13
    reply.answer(answer(request.id, { result: typed }));
  };
  if (IS_STATELESS) {
    if (request.method.startsWith("session/")) throw methodNotFound(request.method); // SLS1
    if (request.method === "sessions/create") return createSealed(service, request, caller, respond);
  }
  switch (request.method) {
    case "session/start": {
      const session = begin(service, caller);
      setCurrent(session, caller);
      respond({ sessionId: session.id, sessionEventId: session.head, expiresAt: session.expiresAt });
      return;
    }
    case "session/resume":
      resume(service, request, caller, respond);
      return;
    case "session/end": {
      const session = ofParams(service, request, caller);
      end(service, session, caller);
      respond({});
      return;
    }
    case "sessions/create": {
      if ((metaOf(request.params)[SESSION] ?? null) !== null) throw invalidParams("sessions/create names a session"); // CRE3
      const session = begin(service, caller);
      respond({ session: session.metadata, _meta: { [HEAD]: session.head } }); // CRE1, CRE6
      return;
    }
    default: {
      const named = namedSession(request.params);
      if (named === undefined || named === null) throw invalidParams("sessions/delete names no session"); // DEL2
      end(service, service.named(named.sessionId, named.state, caller.credential), caller);
      respond({});
    }
  }
}

/** SLS5: without a head, and attached nowhere. */
function createSealed(service: Service, request: Request, caller: Caller, respond: (result: JsonObject) => void): void {
  const named = metaOf(request.params)[SESSION];
  if (named !== undefined && named !== null) throw invalidParams("sessions/create names a session"); // CRE3
  respond({ session: service.registry.make(caller.credential).metadata });
}

/** A new session, attached where it can be heard (ATT2, HTM1). */
function begin(service: Service, caller: Caller): Session {
  const session = service.registry.make(caller.credential);
  if (caller.connection.pushable) attach(session, caller.connection, session.log.head);
  else if (caller.era === "modern") session.waiting = session.log.head;
  return session;
}

/** ASC5; a lone POST has no current session (ASC7). */
function setCurrent(session: Session, { connection, era }: Caller): void {
  if (era === "handshake" && connection.handshake && connection.pushable) connection.current = session;
}

/** RES13: from `params.sessionId` only. */
function ofParams(service: Service, request: Request, { credential }: Caller): Session {
  const sessionId = request.params?.["sessionId"];
  if (typeof sessionId !== "string") throw invalidParams("sessionId");
  return service.named(sessionId, undefined, credential);
}

function resume(service: Service, request: Request, caller: Caller, respond: (result: JsonObject) => void): void {
  const { connection, credential, era } = caller;
  const position = request.params?.["lastSessionEventId"];
  if (typeof request.params?.["sessionId"] !== "string") throw invalidParams("sessionId");
  if (position !== undefined && typeof position !== "string") throw invalidParams("lastSessionEventId");
  const session = ofParams(service, request, caller);
  if (!covers(credential, session.credential)) throw sessionNotFound(session.id); // SEC3

  // RES5: one step, since nothing awaits here.
  session.touch();
  const now = Date.now();
  const found = session.log.find(position, now);
  let reason: Reason | null = "reason" in found ? found.reason : null;
  const from = "number" in found ? found.number : session.log.head;
  const instance = instanceOf(request);
  if (connection.pushable) {
    attach(session, connection, from, instance);
    setCurrent(session, caller);
  } else {
    displace(session, "taken_over", instance);
    session.waiting = era === "modern" ? from : null; // HTM6
    if (era === "handshake") reason = "no_stream"; // RES12
  }
  const replayed = reason === null ? session.log.after(from, now)!.length : 0;
  const told = { resumed: true, catchup: reason === null, sessionEventId: session.head, replayed, expiresAt: session.expiresAt };
  respond(reason === null ? told : { ...told, reason }); // RES4
  if (connection.pushable) connection.pump(session); // RES6: after the result
}

/** END3, END4: everything of the session is over before its end is answered. */
function end(service: Service, session: Session, { connection }: Caller): void {
  if (connection.current === session) connection.current = null; // ASC17
  service.registry.end(session);
}

/** TKO12: malformed is as if it were absent. */
export function instanceOf(request: Request): string | undefined {
  const instance = metaOf(request.params)[INSTANCE];
  return typeof instance === "string" && /^[!-~]{1,64}$/.test(instance) ? instance : undefined;
}
