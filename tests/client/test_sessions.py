"""The table of sessions: what a client knows of its own and of the application's."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.sessions import Session, Sessions, Standing, declares

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
    """The rules of ASC1 to ASC5 and ASC17, said in another way."""

    def __init__(self) -> None:
        self.current: str | None = None
        self.standing = Standing.HERE
        self.attached: set[str] = set()


Change = tuple[str, str]
CHANGES = st.tuples(
    st.sampled_from(["start", "resume", "create", "end", "delete", "expire", "take"]),
    st.sampled_from(IDS),
)


def apply(table: Sessions, model: Model, change: Change) -> None:
    what, session_id = change
    result: dict[str, Any] = {"sessionId": session_id, "sessionEventId": "1"}
    match what:
        case "start":
            table.answered(asked("session/start"), result, {})
        case "resume":
            resumed = {"resumed": True, "catchup": True, "sessionEventId": "1"}
            pending = asked("session/resume", sessionId=session_id, lastSessionEventId="1")
            table.answered(pending, resumed, {})
        case "create":
            table.answered(asked("sessions/create"), {"session": named(session_id)}, {})
        case "end":
            table.answered(asked("session/end", sessionId=session_id), {}, {})
        case "delete":
            table.answered(asked("sessions/delete", named(session_id)), {}, {})
        case "expire":
            table.answered(asked("tools/list", named(session_id)), None, {"code": -32043})
        case _:
            table.left(session_id)
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
    table, model = Sessions(), Model()
    for change in changes:
        apply(table, model, change)
        plain = asked("tools/list").message
        assert table.session_of(plain) == (model.current, model.standing)
        assert table.session_of(asked("tools/list", named("z")).message) == ("z", Standing.HERE)
        assert table.session_of(asked("tools/list", None).message) == (None, Standing.HERE)
        for method in ("ping", "initialize", "session/resume", "sessions/create"):
            assert table.session_of(asked(method).message) == (None, Standing.HERE)
        attached = [held.session_id for held in table.attached()]
        assert set(attached) == model.attached
        if model.current in attached:
            # What is resumed last is current.
            assert attached[-1] == model.current


def test_after_the_end_of_a_session_nothing_of_it_is_known() -> None:
    table = Sessions()
    table.follow("a", "1")
    table.ended("a")
    assert table.has_ended("a") and table.find("a") is None
    table.follow("a", "2")
    assert not table.has_ended("a")


def test_what_left_the_connection_comes_back_when_it_is_asked_for() -> None:
    """By name without a replay (ATT3), or by a resume."""
    for method, session, params in (
        ("tools/list", named("a"), {}),
        ("session/resume", "absent", {"sessionId": "a"}),
    ):
        table = Sessions()
        held = table.follow("a", "1")
        table.missed_events(held)
        assert not table.has_attached and held.is_withheld
        table.answered(asked(method, session, **params), {"sessionEventId": "9"}, {})
        assert table.has_attached and not held.is_withheld


def test_null_gives_up_a_current_session_that_is_not_here() -> None:
    """ASC4."""
    table = Sessions()
    table.answered(asked("session/start"), {"sessionId": "a"}, {})
    assert table.admit(asked("tools/list", None)) is Standing.HERE
    assert table.current == "a"
    table.left("a")
    assert table.admit(asked("tools/list")) is Standing.TAKEN
    assert table.admit(asked("tools/list", None)) is Standing.HERE
    assert table.session_of(asked("tools/list").message) == (None, Standing.HERE)


def test_a_request_that_was_admitted_keeps_its_session() -> None:
    """TKO2: whoever takes a session cannot take an answer."""
    table = Sessions()
    table.answered(asked("session/start"), {"sessionId": "a"}, {})
    pending = asked("tools/list")
    assert table.admit(pending) is Standing.HERE
    table.left("a")
    assert table.admit(pending) is Standing.HERE
    assert pending.session_id == "a"


def test_the_clients_own_session_is_first_and_none_of_the_applications() -> None:
    """The application does not know of it, so it is not resumed for the application."""
    table = Sessions()
    table.follow("a", "1")
    table.begin(own := Session("own"))
    table.follow("b", "1")
    assert table.own is own
    assert table.find("own") is own
    assert table.hosted("own") is None
    assert [held.session_id for held in table.attached()] == ["a", "b"]
    table.begin(Session("next"))
    assert table.find("own") is None
    table.leave()
    assert table.own is None
    assert table.hosted("a") is not None


def test_the_application_may_take_the_clients_own_session() -> None:
    """By its id: it stays one session, whose events it gets from where it says."""
    table = Sessions()
    table.begin(own := Session("own"))
    assert own.follower.admits("1") and own.follower.admits("2")
    resumed = {"resumed": True, "catchup": True, "sessionEventId": "2"}
    table.answered(asked("session/resume", sessionId="own", lastSessionEventId="1"), resumed, {})
    assert table.own is own
    assert own.follower.admits("2")


def test_either_spelling_declares_the_extension() -> None:
    """CAP4."""
    assert declares({"extensions": {"io.github.mcp-sessions/sessions": {}}})
    assert declares({"experimental": {"experimental/sessions": {}}})
    nothings: list[Any] = [{}, None, [], {"extensions": []}, {"experimental": {"sessions": {}}}]
    for nothing in nothings:
        assert not declares(nothing)
