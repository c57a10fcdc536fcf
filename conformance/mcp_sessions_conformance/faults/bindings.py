import json
from collections.abc import Callable

from mcp_sessions_conformance.fault import Case, Fault, Http, Late, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    CREATE,
    RESUME,
    START,
    STATELESS,
    answer,
    code_of,
    drop_member,
    in_events,
    in_results,
    is_event,
    meta_of,
    named,
    refuse,
    said,
)
from mcp_sessions_conformance.values import Json


def _no_origin(http: Http) -> None:
    http.asked.pop("origin", None)


def _get_without_position(http: Http) -> None:
    if http.verb == "GET":
        http.asked.pop("last-event-id", None)


def _post_with_no_position(http: Http) -> None:
    if http.verb == "POST":
        http.asked.pop("last-event-id", None)


def _last_position(http: Http) -> None:
    if http.verb == "GET" and "sse" in http.memory:
        http.asked.setdefault("last-event-id", http.memory["sse"])


def _any_stream(http: Http) -> None:
    own = http.asked.get("mcp-session-id")
    if http.verb == "GET" and own is not None:
        first = http.memory.setdefault("first", own)
        if "last-event-id" in http.asked:
            http.asked["mcp-session-id"] = first


def _always(given: int, instead: int = 200) -> Callable[[Http], None]:
    def change(http: Http) -> None:
        if http.status == given:
            http.status = instead

    return change


def _keeps_connection_id(http: Http) -> None:
    if "mcp-session-id" in http.headers and "mcp-session-id" in http.asked:
        http.headers["mcp-session-id"] = http.asked["mcp-session-id"]


def _one_get(http: Http) -> None:
    if http.verb == "GET":
        http.memory["gets"] = http.memory.get("gets", 0) + 1
        if http.memory["gets"] > 1:
            http.answer = 409, {"error": "one stream only"}


def _no_delete(http: Http) -> None:
    if http.verb == "DELETE":
        http.answer = 200, {}


def _one_era(http: Http) -> None:
    if http.asked.get("mcp-protocol-version") == "2026-07-28":
        http.answer = 400, {"error": "unknown version"}


def _header_is_session(http: Http) -> None:
    if http.asked.get("mcp-protocol-version") == "2026-07-28" and "mcp-session-id" in http.asked:
        http.answer = 404, {"error": "unknown session"}


def _mirror_is_unknown(http: Http) -> None:
    known = http.memory.setdefault("known", set())
    if http.verb == "POST" and http.asked.get("mcp-session-id") not in {None, *known}:
        http.answer = 404, {"error": "unknown session"}


def _learns_connection(http: Http) -> None:
    if "mcp-session-id" in http.headers and "mcp-session-id" not in http.asked:
        http.memory.setdefault("known", set()).add(http.headers["mcp-session-id"])


def _events_need_listen(case: Case) -> Rewritten:
    if is_event(case.message) and "io.modelcontextprotocol/subscriptionId" not in meta_of(
        case.message
    ):
        return []
    return None


def _no_subscription_id(event: Json, case: Case) -> None:
    event["_meta"].pop("io.modelcontextprotocol/subscriptionId", None)


def _late_acknowledgement(case: Case) -> Rewritten:
    if str(case.message.get("method")).endswith("subscriptions/acknowledged"):
        return [Late(case.message)]
    return None


def _only_live(case: Case) -> Rewritten:
    if (case.asked or {}).get("method") in (RESUME, START, CREATE):
        case.memory["waits"] = True
    if str(case.message.get("method")).endswith("subscriptions/acknowledged"):
        case.memory["quiet"] = case.memory.pop("waits", False)
    return [] if is_event(case.message) and case.memory.get("quiet") else None


def _always_resumes(case: Case) -> Rewritten:
    if is_event(case.message):
        case.memory["last"] = case.message
    elif str(case.message.get("method")).endswith("acknowledged") and case.memory.get("last"):
        return [case.message, case.memory["last"]]
    return None


def _old_listen_continues(case: Case) -> Rewritten:
    is_end = (case.asked or {}).get("method") == "subscriptions/listen"
    return [] if is_end and ("result" in case.message or "error" in case.message) else None


def _mismatch_is_served(case: Case) -> Rewritten:
    if code_of(case.message) == -32020:
        return [answer(case.message, said("served"))]
    return None


def _wrong_protocol(headers: dict[str, str]) -> None:
    headers["sec-websocket-protocol"] = "" if headers["sec-websocket-protocol"] else "mcp"


def _compresses(headers: dict[str, str]) -> None:
    headers["sec-websocket-extensions"] = "permessage-deflate"


def _drops_malformed(text: str) -> str | None:
    try:
        message = json.loads(text)
    except ValueError:
        return None
    return text if isinstance(message, dict) and "method" in message else None


def _strips_envelope(case: Case) -> Rewritten:
    if "io.modelcontextprotocol/protocolVersion" not in meta_of(case.message):
        return None
    if case.talk.initialized:
        case.answers.append(refuse(case.message, -32600, "one era per connection"))
        return []
    return None


def _serves_bare(case: Case) -> Rewritten:
    if case.message.get("method") == "tools/list" and not meta_of(case.message):
        case.answers.append(answer(case.message, {"tools": []}))
        return []
    return None


def _no_events(case: Case) -> Rewritten:
    return [] if is_event(case.message) else None


def _one_principal(http: Http) -> None:
    if "authorization" in http.asked:
        first = http.memory.setdefault("authorization", http.asked["authorization"])
        http.asked["authorization"] = first


def _notes_credential(http: Http) -> None:
    if "authorization" in http.asked:
        first = http.memory.setdefault("authorization", http.asked["authorization"])
        http.memory["is_other"] = http.asked["authorization"] != first


def _token_is_owner(case: Case) -> Rewritten:
    session = named(case.message)
    if session is None or not case.memory.get("is_other"):
        return None
    data = {"sessionId": session}
    case.answers.append(refuse(case.message, -32043, "Session not found", data))
    return []


FAULTS = (
    Fault(
        "keeps-connection-id",
        "takes the connection's id from the client",
        status=_keeps_connection_id,
    ),
    Fault(
        "forgets-on-drop",
        "forgets a connection's place when its stream breaks",
        http=_get_without_position,
    ),
    Fault("replays-on-get", "goes on although a GET has no position", http=_last_position),
    Fault("in-every-stream", "replays one connection's stream to another", http=_any_stream),
    Fault("no-priming", "sends no priming events", primes=False),
    Fault("one-get-only", "refuses a second GET", http=_one_get),
    Fault("404-is-200", "answers 200 for unknown connections", status=_always(404)),
    Fault("400-is-404", "answers 404 for what it refuses", status=_always(400, 404)),
    Fault("no-origin-check", "does not look at Origin", http=_no_origin),
    Fault("no-delete", "ignores DELETE", http=_no_delete),
    Fault(
        "no-transport-headers",
        "does not see that headers contradict a resume",
        http=_post_with_no_position,
    ),
    Fault("one-era", "serves one era only", http=_one_era),
    Fault(
        "mirror-is-unknown",
        "takes a mirrored id for a connection",
        http=_mirror_is_unknown,
        status=_learns_connection,
    ),
    Fault(
        "header-is-session",
        "takes Mcp-Session-Id for a session in the modern era",
        http=_header_is_session,
    ),
    Fault("202-is-200", "answers notifications with 200", status=_always(202)),
    Fault(
        "no-subscription-id",
        "leaves out the subscription id",
        to_client=in_events(_no_subscription_id),
    ),
    Fault(
        "late-acknowledgement",
        "sends events before the acknowledgement",
        to_client=_late_acknowledgement,
    ),
    Fault("only-live", "lets nothing wait for a listen", to_client=_only_live),
    Fault("always-resumes", "replays on every listen", to_client=_always_resumes),
    Fault("old-listen-continues", "does not end a listen", to_client=_old_listen_continues),
    Fault(
        "mismatch-is-served",
        "serves requests whose header names another session",
        to_client=_mismatch_is_served,
    ),
    Fault(
        "no-result-type",
        "leaves out resultType",
        to_client=in_results(STATELESS, drop_member("resultType")),
    ),
    Fault("binary-frames", "sends binary frames", binary=True),
    Fault("wrong-subprotocol", "selects another subprotocol", upgrade=_wrong_protocol),
    Fault("closes-1011", "closes with 1011, whatever is wrong", close=1011),
    Fault("compresses", "negotiates compression", upgrade=_compresses),
    Fault("drops-malformed", "does not answer malformed messages", raw=_drops_malformed),
    Fault("drops-huge", "ignores messages that are too big", limit=1_000_000),
    Fault("drops-more-than-64-kib", "ignores messages that are not small", limit=65_536),
    Fault("one-era-per-connection", "serves one era on a connection", to_server=_strips_envelope),
    Fault("serves-bare", "serves modern requests without an envelope", to_server=_serves_bare),
    Fault(
        "events-need-a-listen", "sends events only where a listen is", to_client=_events_need_listen
    ),
    Fault("deaf", "sends no events", to_client=_no_events),
    Fault("one-principal", "takes everybody for the same", http=_one_principal),
    Fault(
        "tokens-are-owners",
        "gives a session to one token of its principal",
        http=_notes_credential,
        to_server=_token_is_owner,
    ),
    Fault("401-is-200", "lets everybody in", status=_always(401)),
)
