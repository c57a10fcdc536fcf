from datetime import UTC, datetime, timedelta

from mcp_sessions_conformance.fault import Case, Fault, Http, Rewritten
from mcp_sessions_conformance.faults.shared_faults import (
    DELETE,
    DETACHED,
    RESUME,
    START,
    answer,
    as_error,
    code_of,
    in_results,
    meta_of,
    named,
    params_of,
    reason_of,
    refuse,
    said,
    state_of,
    text_of,
    tool,
)
from mcp_sessions_conformance.values import KEY, SESSION, Json


def _begins_what_it_refuses(case: Case) -> Rewritten:
    if tool(case.message) == "drain":
        # The server itself does not shut down: it would begin nothing any more.
        case.memory["draining"] = True
        case.answers.append(answer(case.message, said("draining")))
        return []
    if case.memory.get("draining") and "id" in case.message:
        data = {"reason": "draining", "started": False}
        case.answers.append(refuse(case.message, -32603, "Internal error", data))
    return None


def _hides_the_reason(case: Case) -> Rewritten:
    if reason_of(case.message) != "draining":
        return None
    return [refuse(case.message, -32603, "Internal error")]


def _fails_meanwhile(http: Http) -> None:
    http.status = 500 if http.status == 503 else http.status


def _takes_no_answers(case: Case) -> Rewritten:
    if tool(case.message) == "drain":
        case.memory["draining"] = True
    return [] if case.memory.get("draining") and "method" not in case.message else None


def _says_nothing(case: Case) -> Rewritten:
    is_notice = case.message.get("method") == DETACHED
    return [] if is_notice and params_of(case.message).get("reason") == "draining" else None


def _expires_while_it_runs(case: Case) -> Rewritten:
    if tool(case.asked) == "hold" and text_of(case.message) == "held":
        case.memory["expired"] = True
    if not case.memory.get("expired") or case.asked is None or not named(case.asked):
        return None
    sent: Json = {"sessionId": named(case.asked)}
    return None if tool(case.asked) == "hold" else [refuse(case.message, -32043, data=sent)]


def _stays_after_the_notice(case: Case) -> Rewritten:
    is_late = code_of(case.message) == -32043 and tool(case.asked) == "session_id"
    return [answer(case.message, said(str(named(case.asked or {}))))] if is_late else None


def _promises_more(result: Json, case: Case) -> None:
    later = datetime.now(UTC) + timedelta(minutes=1)
    result["expiresAt"] = later.strftime("%Y-%m-%dT%H:%M:%SZ")


def _evicts_what_expired(result: Json, case: Case) -> None:
    if result.get("reason") == "expired":
        result["reason"] = "evicted"


def _runs_on(case: Case) -> Rewritten:
    is_given_up = code_of(case.message) == -31012 and tool(case.asked) == "hold"
    return [answer(case.message, said("held"))] if is_given_up else None


def _moves_its_end(result: Json, case: Case) -> None:
    if case.asked is not None and named(case.asked):
        _promises_more(state_of(result), case)


def _continues_from_the_newest(case: Case) -> Rewritten:
    if "result" in case.message:
        token = state_of(case.message["result"]).get("state")
        if token is not None:
            case.memory["newest"] = token
        return None
    session = meta_of(case.message).get(SESSION)
    if not session or "newest" not in case.memory:
        return None
    session["state"] = case.memory["newest"]
    return [case.message]


def _fails_to_delete(case: Case) -> Rewritten:
    if case.asked is None or case.asked["method"] != DELETE or "result" not in case.message:
        return None
    return [refuse(case.message, -32043, "Session not found", {"sessionId": named(case.asked)})]


def _keeps_answers(case: Case) -> Rewritten:
    if case.asked is None or KEY not in meta_of(case.asked) or "result" not in case.message:
        return None
    kept = case.memory.setdefault(meta_of(case.asked)[KEY], case.message["result"])
    return [answer(case.message, kept)]


FAULTS = (
    Fault(
        "begins-what-it-refuses",
        "begins requests that it refuses as draining",
        to_server=_begins_what_it_refuses,
    ),
    Fault(
        "draining-is-a-failure",
        "refuses without a reason while it shuts down",
        to_client=_hides_the_reason,
    ),
    Fault("goes-away-at-last", "closes with 1001 when it shuts down", close=1001),
    Fault("fails-meanwhile", "answers 500 while it shuts down", status=_fails_meanwhile),
    Fault("takes-no-answers", "takes no answers while it shuts down", to_server=_takes_no_answers),
    Fault("drains-in-silence", "tells nobody that it shuts down", to_client=_says_nothing),
    Fault(
        "expires-while-it-runs",
        "takes a session for idle while a request of it runs",
        to_client=_expires_while_it_runs,
    ),
    Fault(
        "stays-after-the-notice",
        "keeps a session as long as there is something to tell it",
        to_client=_stays_after_the_notice,
    ),
    Fault(
        "promises-more",
        "says that sessions expire later than they do",
        to_client=in_results((START,), _promises_more),
    ),
    Fault(
        "expired-is-evicted",
        "calls what was dropped for its age dropped for want of space",
        to_client=in_results((RESUME,), _evicts_what_expired),
    ),
    Fault("buffers-everything", "keeps whatever its clients do not take", buffers=True),
    Fault("runs-on", "gives up nothing without a listener", to_client=_runs_on),
    Fault(
        "starts-without-a-store",
        "starts sessions that it cannot resume",
        to_client=as_error(
            -32601,
            lambda case: case.asked is not None and case.asked["method"] == START,
            {"sessionId": "x" * 43, "sessionEventId": "0", "expiresAt": "2100-01-01T00:00:00Z"},
        ),
    ),
    Fault(
        "moves-its-end",
        "says another end in each answer",
        to_client=in_results(("tools/call",), _moves_its_end),
    ),
    Fault(
        "goes-on-from-the-newest",
        "has another state than the one that it is sent",
        to_server=_continues_from_the_newest,
        to_client=_continues_from_the_newest,
    ),
    Fault("fails-to-delete", "refuses to delete what is there", to_client=_fails_to_delete),
    Fault("keeps-answers", "gives kept answers without a store", to_client=_keeps_answers),
)

PROVES = """\
ERR15: begins-what-it-refuses by what-a-draining-server-refuses-did-not-begin
WSS17: goes-away-at-last by a-draining-server-closes-1012
SES14: expires-while-it-runs by a-running-request-keeps-its-session
SES14: stays-after-the-notice by only-requests-keep-a-session
SES16: promises-more by expires-at-is-not-later-than-the-truth
CUP8: expired-is-evicted by what-is-too-old-is-expired
ATT7: buffers-everything by who-takes-nothing-is-cut
REQ8: runs-on by what-has-no-listener-is-given-up
SLS1: starts-without-a-store by without-a-store-there-is-no-session-start
SLS2: moves-its-end by a-sealed-id-has-a-fixed-end
SLS2: one-principal by a-sealed-id-is-its-owners
SLS3: goes-on-from-the-newest by the-token-is-the-state
SLS4: fails-to-delete by deleting-revokes-nothing-without-a-store
SLS5: keeps-answers by without-a-store-keys-and-events-are-none
"""
"""Lines of ``proven.py``."""
