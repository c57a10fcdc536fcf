/** The core protocol's methods, as far as an example needs them, and what of it the extension touches. */

import type { Run, Sender } from "./run.js";
import { checkUri } from "./listen.js";
import { IS_STATELESS, LIMITS } from "./limits.js";
import { INFO, type Service } from "./service.js";
import { callTool, TOOLS } from "./tools.js";
import {
  EXTENSION, HANDSHAKE_VERSIONS, invalidParams, limitReached, methodNotFound, MODERN,
  type JsonObject,
} from "./wire.js";

const RESOURCE = { uri: "conformance://resource/example", name: "example" };
const PROMPT = { name: "greet", description: "Says hello." };

/** CAP1, CAP3. */
const TRANSPORTS = ["streamable-http", "websocket", "stdio"];

function capabilities(): JsonObject {
  return {
    tools: { listChanged: true },
    prompts: { listChanged: true },
    resources: { listChanged: true, subscribe: true },
    logging: {},
    sessions: {},
    extensions: {
      [EXTENSION]: IS_STATELESS ? { transports: TRANSPORTS, features: ["create", "delete", "state"] } : {
        window: { maxEvents: LIMITS.windowEvents, maxBytes: LIMITS.windowBytes, maxAge: LIMITS.windowAge },
        requestKeys: { lifetime: LIMITS.keyLifetime, maxBytes: LIMITS.keyBytes },
        transports: TRANSPORTS,
        features: ["start", "resume", "end", "create", "delete", "state", "requestKey"],
      },
    },
  };
}

/** GAT1: one tool is served inside a session only. */
export const isGated = ({ method, params }: { method: string; params?: JsonObject }): boolean =>
  method === "tools/call" && params?.["name"] === "members_only";

/** Runs a request. What it throws is the answer. */
export async function callCore(service: Service, run: Run, sender: Sender): Promise<JsonObject> {
  const { request, connection, era } = sender;
  const params = request.params ?? {};
  switch (request.method) {
    case "initialize": {
      if (era === "modern") break;
      const asked = params["protocolVersion"];
      if (typeof asked !== "string") throw invalidParams("protocolVersion");
      connection.handshake = true;
      connection.declare(params["capabilities"]);
      const protocolVersion = HANDSHAKE_VERSIONS.includes(asked) ? asked : HANDSHAKE_VERSIONS.at(-1)!;
      connection.version = protocolVersion;
      return { protocolVersion, capabilities: capabilities(), serverInfo: INFO };
    }
    case "server/discover":
      if (era === "handshake") break;
      return { supportedVersions: [MODERN], capabilities: capabilities(), serverInfo: INFO, ttlMs: 0, cacheScope: "private" };
    case "ping":
    case "logging/setLevel":
      return {};
    case "tools/list":
      return listed(era, { tools: TOOLS });
    case "prompts/list":
      return listed(era, { prompts: [PROMPT] });
    case "prompts/get":
      return { messages: [{ role: "user", content: { type: "text", text: "Hello." } }] };
    case "resources/list":
      return listed(era, { resources: [RESOURCE] });
    case "resources/templates/list":
      return listed(era, { resourceTemplates: [] });
    case "resources/read":
      return listed(era, { contents: [{ uri: params["uri"] ?? null, text: "example" }] });
    case "resources/subscribe":
    case "resources/unsubscribe": {
      // EVT13: those of the session, or of the connection. In the modern era a listen does it for the rest.
      if (run.session === null && !connection.pushable) break;
      const uri = params["uri"];
      if (typeof uri !== "string") throw invalidParams("uri");
      const subscriptions = run.session?.subscriptions ?? connection.subscriptions;
      if (request.method === "resources/unsubscribe") subscriptions.delete(uri);
      else {
        checkUri(uri);
        if (subscriptions.size >= LIMITS.subscriptions && !subscriptions.has(uri)) throw limitReached("max_subscriptions");
        subscriptions.add(uri);
      }
      return {};
    }
    case "tools/call":
      return callTool(service, run, params);
    default:
  }
  throw methodNotFound(request.method);
}

/** 2026-07-28 says of lists how long they may be cached. */
const listed = (era: string, result: JsonObject): JsonObject =>
  era === "modern" ? { ...result, ttlMs: 0, cacheScope: "private" } : result;
