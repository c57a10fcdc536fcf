"""A server of the era of 2026-07-28 only on stdio, in plain Python, that can be asked to misbehave.

``modern_child.py [MISDEED]``; its tools are those of ``child_server.py``. What it asks is a result,
and what it tells by itself goes to those who listen.
"""

from __future__ import annotations

import json
import os
import sys
import time

# The path of this repository: a command gets none.
sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")))

from tests.support import child_server as base

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

Json = base.Json
receive, note, say, text = base.receive, base.note, base.say, base.text

PREFIX = "io.modelcontextprotocol"
VERSION = "2026-07-28"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"

listens: dict[Any, Json] = {}
"""The id of its request → its answer."""


def notify(method: str, params: Json) -> None:
    """A change, to whoever listens for it."""
    for request_id, wanted in listens.items():
        if params.get("uri") in wanted.get("resourceSubscriptions", []):
            meta = {f"{PREFIX}/subscriptionId": request_id}
            say({"method": method, "params": {**params, "_meta": meta}})


tasks: dict[str, Json] = {}
"""Tasks of its own, by their ids, as it shows them."""


def own_task(method: str, params: Json) -> Json | None:
    """``None``: there is no such task."""
    shown = tasks.get(params["taskId"])
    if shown is None:
        return None
    if method == "tasks/get":
        return shown
    if method == "tasks/cancel":
        shown["status"] = "cancelled"
    elif params["inputResponses"]:
        del shown["inputRequests"]
        done = text(json.dumps(params["inputResponses"], sort_keys=True))
        shown |= {"status": "completed", "result": done}
    return {}


def ask(params: Json) -> Json:
    answers: Json | None = params.get("inputResponses")
    if answers is None:
        schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
        form: Json = {"message": params["arguments"]["question"], "requestedSchema": schema}
        question = {"method": "elicitation/create", "params": form}
        needed = {"inputRequests": {"q": question}, "requestState": "kept"}
        return {"resultType": "input_required", **needed}
    return text(json.dumps(answers["q"], sort_keys=True))


def call(request: Json) -> Json | None:
    params: Json = request["params"]
    arguments: Json = params.get("arguments") or {}
    match params["name"]:
        case "ask":
            if "inputResponses" not in params:
                base.count += 1
                note("ask")
            return ask(params)
        case "own task":
            form: Json = {
                "message": "who?",
                "requestedSchema": {"type": "object", "properties": {}},
            }
            asked: Json = {"q": {"method": "elicitation/create", "params": form}}
            name = f"own {len(tasks)}"
            shown: Json = {"taskId": name, "status": "working", "ttlMs": None, "pollIntervalMs": 10}
            shown |= {"createdAt": "2026-11-28T12:00:00Z", "lastUpdatedAt": "2026-11-28T12:00:00Z"}
            tasks[name] = {**shown, "status": "input_required", "inputRequests": asked}
            return {"resultType": "task", **shown}
        case "update":
            notify("notifications/resources/updated", {"uri": arguments["uri"]})
            return text("updated")
        case "question":
            # Which that era has not.
            answer = base.ask("roots/list", {})
            return text(json.dumps(answer))
        case "hang up":
            for request_id in list(listens):
                del listens[request_id]
                if arguments["how"] == "answer":
                    say({"id": request_id, "result": {}})
                else:
                    about = {"requestId": request_id}
                    say({"method": "notifications/cancelled", "params": about})
            return text("hung up")
        case "listens":
            return text(json.dumps(list(listens.values()), sort_keys=True))
        case _:
            return base.tool(request)


def listen(request: Json, misdeed: str) -> None:
    if misdeed == "one listen" and listens:
        error = {"code": -32603, "message": "Subscription limit reached"}
        say({"id": request["id"], "error": error})
        return
    wanted: Json = request["params"]["notifications"]
    listens[request["id"]] = wanted
    note("listen")
    meta = {f"{PREFIX}/subscriptionId": request["id"]}
    say({"method": ACKNOWLEDGED, "params": {"notifications": wanted, "_meta": meta}})


def serve(request: Json, misdeed: str) -> None:
    method: str = request["method"]
    params: Json = request.get("params") or {}
    meta: Json = params.get("_meta") or {}
    result: Json | None
    if meta.get(f"{PREFIX}/protocolVersion") != VERSION:
        if misdeed == "answers initialize" and method == "initialize":
            found: Json = {"protocolVersion": VERSION, "capabilities": {}, "serverInfo": {}}
            say({"id": request["id"], "result": found})
            return
        error: Json = {"code": -32022, "message": "Unsupported protocol version"}
        say({"id": request["id"], "error": error})
        return
    match method:
        case "server/discover":
            if misdeed == "slow" and not os.path.exists(os.environ["SLOW"]):
                open(os.environ["SLOW"], "w").close()
                time.sleep(1)
            capabilities: Json = {"tools": {"listChanged": True}, "resources": {}, "logging": {}}
            info = {"name": "child", "version": "1", "ofAnotherKind": True}
            result = {"supportedVersions": ["2027-01-01" if misdeed == "newer" else VERSION]}
            result |= {"capabilities": capabilities, "instructions": "ask me"}
            result |= {"_meta": {f"{PREFIX}/serverInfo": info}}
        case "subscriptions/listen":
            listen(request, misdeed)
            return
        case "tools/call":
            base.client = meta
            result = call(request)
        case "tasks/get" | "tasks/update" | "tasks/cancel":
            result = own_task(method, params)
            if result is None:
                error = {"code": -32602, "message": "unknown here"}
                say({"id": request["id"], "error": error})
                return
        case "tools/list":
            result = {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}
        case _:
            error = {"code": -32601, "message": "Method not found", "data": method}
            say({"id": request["id"], "error": error})
            return
    if result is not None:
        say({"id": request["id"], "result": {"resultType": "complete", **result}})


def main(misdeed: str = "") -> None:
    note("started")
    while True:
        message = receive()
        if "id" in message and "method" in message:
            serve(message, misdeed)
        elif message.get("method") == "notifications/cancelled":
            listens.pop(message["params"]["requestId"], None)
        else:
            note(json.dumps(message))


if __name__ == "__main__":
    main(*sys.argv[1:])
