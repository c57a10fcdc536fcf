"""`mcp_sessions.client.hosted`: what an application's connection knows of its sessions."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.client.hosted import HostedSessions, Standing, declares
from mcp_sessions.client.requests import PendingRequest

SESSION = "io.modelcontextprotocol/session"
IDS = ("a", "b", "c")


def asked(method: str, session: Any = "absent", **params: Any) -> PendingRequest:
    if session != "absent":
        params["_meta"] = {SESSION: session}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return PendingRequest(1, message, {}, 0.0)


def named(session_id: str) -> dict[str, str]:
    return {"sessionId": session_id}


class Model:
    """The rules of ASC1 to ASC5, ASC17 and ASC18, said in another way."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.standing = Standing.HERE
        self.attached: set[str] = set()


Change = tuple[str, str]
CHANGES = st.tuples(
    st.sampled_from(["start", "resume", "create", "end", "delete", "expire", "take"]),
    st.sampled_from(IDS),
)


def apply(hosted: HostedSessions, model: Model, change: Change) -> None:
    what, session_id = change
    result: dict[str, Any] = {"sessionId": session_id, "sessionEventId": "1"}
    match what:
        case "start":
            hosted.answered(asked("session/start"), result, {})
        case "resume":
            resumed = {"resumed": True, "catchup": True, "sessionEventId": "1"}
            pending = asked("session/resume", sessionId=session_id, lastSessionEventId="1")
            hosted.answered(pending, resumed, {})
        case "create":
            hosted.answered(asked("sessions/create"), {"session": named(session_id)}, {})
        case "end":
            hosted.answered(asked("session/end", sessionId=session_id), {}, {})
        case "delete":
            hosted.answered(asked("sessions/delete", named(session_id)), {}, {})
        case "expire":
            hosted.answered(asked("tools/list", named(session_id)), None, {"code": -32043})
        case _:
            hosted.left(session_id)
    if what in ("start", "resume"):
        model.current, model.standing = session_id, Standing.HERE
    if what in ("start", "resume", "create"):
        model.attached.add(session_id)
    else:
        model.attached.discard(session_id)
    if model.current == session_id and what in ("end", "delete"):
        model.current, model.standing = None, Standing.HERE
    if model.current == session_id and what == "expire":
        model.standing = Standing.GONE
    if model.current == session_id and what == "take" and model.standing is Standing.HERE:
        model.standing = Standing.TAKEN


@given(st.lists(CHANGES, max_size=12))
def test_a_request_is_of_the_session_that_its_connection_gives_it(changes: list[Change]) -> None:
    hosted, model = HostedSessions(), Model()
    for change in changes:
        apply(hosted, model, change)
        plain = asked("tools/list").message
        assert hosted.session_of(plain) == (model.current, model.standing)
        assert hosted.session_of(asked("tools/list", named("z")).message) == ("z", Standing.HERE)
        assert hosted.session_of(asked("tools/list", None).message) == (None, Standing.HERE)
        for method in ("ping", "initialize", "session/resume", "sessions/create"):
            assert hosted.session_of(asked(method).message) == (None, Standing.HERE)
        attached = [held.session_id for held in hosted.attached()]
        assert set(attached) == model.attached
        if model.current in attached:
            # What is resumed last is current.
            assert attached[-1] == model.current


def test_after_the_end_of_a_session_nothing_of_it_is_known() -> None:
    hosted = HostedSessions()
    hosted.follow("a", "1")
    hosted.ended("a")
    assert hosted.has_ended("a") and hosted.find("a") is None
    hosted.follow("a", "2")
    assert not hosted.has_ended("a")


def test_what_left_the_connection_comes_back_when_it_is_asked_for() -> None:
    """By name without a replay (ATT3), or by a resume."""
    for method, session, params in (
        ("tools/list", named("a"), {}),
        ("session/resume", "absent", {"sessionId": "a"}),
    ):
        hosted = HostedSessions()
        held = hosted.follow("a", "1")
        hosted.missed_events(held)
        assert not hosted.has_attached and held.is_withheld
        hosted.answered(asked(method, session, **params), {"sessionEventId": "9"}, {})
        assert hosted.has_attached and not held.is_withheld


def test_null_gives_up_a_current_session_that_is_not_here() -> None:
    """ASC4."""
    hosted = HostedSessions()
    hosted.answered(asked("session/start"), {"sessionId": "a"}, {})
    hosted.cleared()
    assert hosted.current == "a"
    hosted.left("a")
    hosted.cleared()
    assert hosted.session_of(asked("tools/list").message) == (None, Standing.HERE)


def test_either_spelling_declares_the_extension() -> None:
    """CAP4."""
    assert declares({"extensions": {"io.github.mcp-sessions/sessions": {}}})
    assert declares({"experimental": {"experimental/sessions": {}}})
    nothings: list[Any] = [{}, None, [], {"extensions": []}, {"experimental": {"sessions": {}}}]
    for nothing in nothings:
        assert not declares(nothing)
