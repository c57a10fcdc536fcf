"""Valid messages of both eras, from which fuzzers begin."""

from typing import Any

from tests.fuzz.hostile import Hostile
from tests.support.modern import envelope
from tests.support.raw import EXTENSION, KEY, NEWEST, SESSION, Json

URI = "test://a"

REQUESTS: dict[str, list[Json]] = {
    "ping": [{}],
    "tools/list": [{}, {"cursor": "1"}],
    "tools/call": [
        {"name": "echo", "arguments": {"text": "a", "n": [1, {"b": None}]}},
        {"name": "state", "arguments": {}},
        {"name": "emit", "arguments": {}, "_meta": {"progressToken": 1}},
        {"name": "echo", "arguments": {}, "_meta": {KEY: "key", SESSION: {"sessionId": "s"}}},
    ],
    "resources/read": [{"uri": URI}],
    "resources/subscribe": [{"uri": URI}],
    "resources/unsubscribe": [{"uri": URI}],
    "completion/complete": [
        {"ref": {"type": "ref/prompt", "name": "p"}, "argument": {"name": "a", "value": "b"}}
    ],
    "logging/setLevel": [{"level": "info"}],
    "example/echo": [{"echo": [1, "a"]}],
    "session/start": [{}],
    "session/resume": [{"sessionId": "s", "lastSessionEventId": "1"}],
    "session/end": [{"sessionId": "s"}],
    "sessions/create": [{}],
    "sessions/delete": [{}],
    "server/discover": [{}],
    "initialize": [
        {
            "protocolVersion": NEWEST,
            "capabilities": {"extensions": {EXTENSION: {}}, "elicitation": {}, "roots": {}},
            "clientInfo": {"name": "fuzz", "version": "1"},
        }
    ],
}

NOTIFICATIONS: dict[str, list[Json]] = {
    "notifications/initialized": [{}],
    "notifications/roots/list_changed": [{}],
    # Of no request that a fuzzer waits for.
    "notifications/cancelled": [{"requestId": 1_000, "reason": "x"}],
    "notifications/progress": [{"progressToken": 1, "progress": 1, "total": 2}],
}


def request(hostile: Hostile, request_id: Any, *, modern: bool = False) -> Json:
    method = hostile.one_of(*REQUESTS)
    params = hostile.one_of(*REQUESTS[method])
    if modern:
        params = {**params, "_meta": envelope(params.get("_meta"))}
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def other(hostile: Hostile) -> Json:
    """A message that is no request: a notification, or an answer that nobody asked for."""
    match hostile.random.randrange(4):
        case 0:
            return {"jsonrpc": "2.0", "id": hostile.one_of(0, 1, "x"), "result": {"x": 1}}
        case 1:
            error: Json = {"code": -1, "message": "x", "data": {}}
            return {"jsonrpc": "2.0", "id": hostile.one_of(0, 1, "x"), "error": error}
        case _:
            method = hostile.one_of(*NOTIFICATIONS)
            params = hostile.one_of(*NOTIFICATIONS[method])
            return {"jsonrpc": "2.0", "method": method, "params": params}
