"""``mcp_sessions.core.messages``: what is read is understood or refused, what is written right."""

import copy
import json
import tracemalloc
from collections.abc import Callable
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mcp_sessions.core.log import Draft
from mcp_sessions.core.messages import (
    REQUEST_KEY_META,
    SESSION_META,
    Answer,
    EventTemplate,
    Malformed,
    Notification,
    NotNamed,
    Request,
    answer_instead_of,
    decode,
    decode_kept,
    encode,
    error_body,
    error_outcome,
    meta_of,
    named_session,
    notification_message,
    parse,
    plain_draft,
    progress_token,
    request_key,
    request_message,
    result_message,
    result_outcome,
    session_id_member,
    wire_error,
    without_session,
)
from mcp_sessions.core.request_keys import KeyUse, RequestKeys
from mcp_sessions.errors import InvalidParams, LimitReached, SessionDetached
from mcp_sessions.ids import Position, RequestKey, SessionEventId, SessionId
from tests.support.log_epochs import log_epoch

EVENT_ID: SessionEventId = Position(log_epoch(1_800_000_000_000, 0), 42).event_id()

# --- any JSON --------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(TEXT, JSON, max_size=4)
IDS = TEXT | st.integers(-(2**63), 2**63 - 1)

# A message in which every member may be right, missing or of any other type.
NEARLY_MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | JSON,
        "id": IDS | JSON,
        "method": TEXT | JSON,
        "params": OBJECTS | JSON,
        "result": OBJECTS | JSON,
        "error": st.fixed_dictionaries(
            {}, optional={"code": NUMBERS | JSON, "message": TEXT | JSON, "data": JSON}
        )
        | JSON,
    },
)


def value_of(members: Any, name: str) -> Any:
    return members.get(name)


@given(JSON | NEARLY_MESSAGES)
def test_any_json_is_a_message_or_malformed(value: Any) -> None:
    """WSS14, STD3: accepted, or refused with a documented error."""
    try:
        message = parse(value)
    except Malformed as refused:
        assert str(refused)
        return
    assert value["jsonrpc"] == "2.0"
    match message:
        case Request():
            assert (message.id, message.method) == (value["id"], value["method"])
            assert message.params == value.get("params")
        case Notification():
            assert "id" not in value and message.method == value["method"]
            assert message.params == value.get("params")
        case Answer():
            assert message.id == value.get("id") and value.get("method") is None
            assert (message.result is None) != (message.error is None)
            assert message.result in (None, value.get("result"))
            assert message.error in (None, value.get("error"))
    if not isinstance(message, Notification):
        assert isinstance(message.id, (str, int, type(None))) and not isinstance(message.id, bool)


@given(st.binary(max_size=60) | NEARLY_MESSAGES.map(encode).map(lambda body: body[:-1]))
def test_any_bytes_are_json_or_a_value_error(body: bytes) -> None:
    """A peer's bytes are one of the two."""
    try:
        value = decode(body)
    except ValueError:
        return
    assert decode(encode(value)) == value


@pytest.mark.parametrize(
    "body",
    [
        *[
            b"",
            b"{",
            b"nul",
            b"NaN",
            b"[Infinity]",
            b'"\\ud800"',
            b'"\xff"',
            b"[" * 100_000,
            b"1 2",
        ],
        *[b"1e400", b"[-1e400, 18446744073709551617]"],
    ],
)
def test_what_is_no_json_is_a_value_error(body: bytes) -> None:
    """Also what Python's own parser takes (NaN), and what is too deep."""
    with pytest.raises(ValueError, match="."):
        decode(body)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ([{"jsonrpc": "2.0", "method": "ping", "id": 1}], "object"),
        (None, "object"),
        ({"method": "ping", "id": 1}, "jsonrpc"),
        ({"jsonrpc": 2.0, "method": "ping", "id": 1}, "jsonrpc"),
        ({"jsonrpc": "2.0"}, "method"),
        ({"jsonrpc": "2.0", "id": 1}, "method"),
        ({"jsonrpc": "2.0", "method": 7, "id": 1}, "method"),
        ({"jsonrpc": "2.0", "method": "ping", "id": None}, "id"),
        ({"jsonrpc": "2.0", "method": "ping", "id": True}, "id"),
        ({"jsonrpc": "2.0", "method": "ping", "id": 1.5}, "id"),
        ({"jsonrpc": "2.0", "method": "ping", "id": [1]}, "id"),
        ({"jsonrpc": "2.0", "method": "ping", "id": 1, "params": []}, "params"),
        ({"jsonrpc": "2.0", "method": "ping", "params": "x"}, "params"),
        ({"jsonrpc": "2.0", "id": 1, "result": None}, "result"),
        ({"jsonrpc": "2.0", "id": None, "result": {}}, "id"),
        ({"jsonrpc": "2.0", "result": {}}, "id"),
        ({"jsonrpc": "2.0", "id": 1, "error": "no"}, "error"),
        ({"jsonrpc": "2.0", "id": 1, "error": {"code": "1", "message": "no"}}, "error"),
        ({"jsonrpc": "2.0", "id": 1, "error": {"code": True, "message": "no"}}, "error"),
        ({"jsonrpc": "2.0", "id": 1, "error": {"code": 1}}, "error"),
        ({"jsonrpc": "2.0", "id": [], "error": {"code": 1, "message": "no"}}, "id"),
    ],
)
def test_what_is_malformed_is_notified_which_member_is_wrong(message: object, says: str) -> None:
    """2025-06-18 removed batches; ids are strings or integers, never null (MCP)."""
    with pytest.raises(Malformed, match=says):
        parse(message)


def test_the_smallest_messages_are_understood() -> None:
    """No ``params``, null ``params``, an error to a message whose id is unknown."""
    error = {"code": -32700, "message": "Parse error"}

    assert parse({"jsonrpc": "2.0", "id": 0, "method": "ping"}) == Request(0, "ping", None)
    assert parse({"jsonrpc": "2.0", "id": "", "method": "", "params": None}) == Request(
        "", "", None
    )
    assert parse({"jsonrpc": "2.0", "method": "x"}) == Notification("x", None)
    assert parse({"jsonrpc": "2.0", "id": 1, "result": {}}) == Answer(1, {}, None)
    assert parse({"jsonrpc": "2.0", "id": None, "error": error}) == Answer(None, None, error)
    assert parse({"jsonrpc": "2.0", "error": error}) == Answer(None, None, error)


def test_an_integer_of_any_size_is_read_as_it_was_written() -> None:
    """The SDK's parser keeps it; here a tool would be called with another number."""
    assert decode(b'{"n":18446744073709551617}') == {"n": 2**64 + 1}


RARE: list[Any] = [2**64, -(2**70), "\ud800", {"a": [{"b": 2**64}]}]
DEEP = json.loads("[" * 300 + "1" + "]" * 300)


@pytest.mark.parametrize("value", [*RARE, DEEP], ids=["large", "low", "surrogate", "inner", "deep"])
def test_what_orjson_refuses_and_json_can_say_is_written(value: object) -> None:
    """The handler ran: its answer must not fail because of an integer over 64 bits."""
    outcome = result_outcome({"value": value})

    assert decode_kept(outcome) == {"result": {"value": value}}
    answer = json.loads(result_message(1, {"value": value}))
    assert answer == {"jsonrpc": "2.0", "id": 1, "result": {"value": value}}


@pytest.mark.parametrize(
    "value", [{1: 2}, {"a": 2**64, "b": {1: 2}}, {"a": {None: 2**64}}, object(), {"a": b"bytes"}]
)
def test_what_json_cannot_say_is_a_type_error(value: object) -> None:
    """One error whatever the cause; a name that is no string is not quietly made one."""
    with pytest.raises(TypeError):
        encode(value)


# --- what a request says about its session -----------------------------------------------------


METADATA = st.fixed_dictionaries(
    {},
    optional={
        SESSION_META: st.fixed_dictionaries({}, optional={"sessionId": JSON, "state": JSON}) | JSON,
        REQUEST_KEY_META: JSON,
        "progressToken": JSON,
    },
)
PARAMS = st.fixed_dictionaries({}, optional={"_meta": METADATA | JSON, "sessionId": JSON})


@given(st.none() | PARAMS | OBJECTS)
def test_any_params_name_a_session_or_none_or_are_invalid(params: dict[str, Any] | None) -> None:
    """Whatever a caller sends: an answer, or ``-32602``; nothing else."""
    for read in (named_session, request_key):
        try:
            value = read(meta_of(params))
        except InvalidParams as refused:
            assert refused.code == -32602
        else:
            assert value is None or isinstance(value, (str, NotNamed))
    assert isinstance(progress_token(meta_of(params)), (str, int, type(None)))


@given(JSON)
def test_any_session_metadata_names_a_session_or_none_or_is_invalid(value: Any) -> None:
    """ASC10: ``-32602`` for malformed metadata."""
    try:
        named = named_session({SESSION_META: value})
    except InvalidParams as refused:
        assert refused.code == -32602 and SESSION_META in refused.message
        assert not isinstance(value, dict) or not isinstance(value_of(value, "sessionId"), str)
    else:
        assert named is NotNamed.NULL if value is None else named == value["sessionId"]


@given(JSON)
def test_any_request_key_is_a_key_or_invalid(value: Any) -> None:
    """A key is a string of 1 to 256 characters."""
    try:
        key = request_key({REQUEST_KEY_META: value})
    except InvalidParams as refused:
        assert refused.code == -32602 and REQUEST_KEY_META in refused.message
        assert not isinstance(value, str) or not value
    else:
        assert key == value


@given(st.none() | PARAMS | OBJECTS)
def test_what_a_handler_sees_names_no_session_and_no_key_and_has_all_else(
    params: dict[str, Any] | None,
) -> None:
    """The credential and the sealed state are the layer's business."""
    before = copy.deepcopy(params)
    seen = without_session(params)
    assert params == before
    meta, seen_meta = meta_of(params), meta_of(seen)
    ours = {SESSION_META, REQUEST_KEY_META}
    assert seen_meta == {name: value for name, value in meta.items() if name not in ours}
    if not ours & meta.keys():
        assert seen is params
    else:
        assert seen is not None and params is not None
        assert ("_meta" in seen) == bool(seen_meta)
        assert {**seen, "_meta": None} == {**params, "_meta": None}


def test_a_session_is_named_in_the_metadata_and_nowhere_else() -> None:
    """ASC1: ``params.meta`` is a client's bug, ignored."""
    session = {"sessionId": "s", "state": "x"}

    def named(params: dict[str, Any] | None) -> object:
        return named_session(meta_of(params))

    assert named({"_meta": {SESSION_META: session}}) == "s"
    assert named({"_meta": {SESSION_META: None}}) is NotNamed.NULL
    assert named({"meta": {SESSION_META: session}}) is NotNamed.ABSENT
    assert named({SESSION_META: session, "sessionId": "s"}) is NotNamed.ABSENT
    unnamed: list[dict[str, Any] | None] = [None, {}, {"_meta": None}, {"_meta": "x"}]
    assert {named(params) for params in unnamed} == {NotNamed.ABSENT}


def test_a_string_that_cannot_be_a_session_id_names_an_unknown_session() -> None:
    """ERR2, SES4: it gets the answer of any unknown id, with what the caller sent."""
    for text in ("", "a b", "ä", "x" * 5_000):
        assert named_session({SESSION_META: {"sessionId": text}}) == text
        assert session_id_member({"sessionId": text}, "params.sessionId") == text


@pytest.mark.parametrize("members", [None, {}, {"sessionId": None}, {"sessionId": 7}, {"x": "y"}])
def test_a_session_id_that_is_no_string_is_invalid_and_the_answer_says_where(
    members: dict[str, Any] | None,
) -> None:
    """RES13: absent or mistyped: ``-32602``."""
    with pytest.raises(InvalidParams, match="params.sessionId must be a string"):
        session_id_member(members, "params.sessionId")


@pytest.mark.parametrize("length", [1, 256])
def test_a_request_key_may_be_as_long_as_the_limit(length: int) -> None:
    """Both ends of 1 to 256."""
    assert request_key({REQUEST_KEY_META: "k" * length}) == "k" * length


@pytest.mark.parametrize("value", ["", "k" * 257, None, 7, ["k"]])
def test_a_request_key_of_another_length_or_type_is_invalid(value: object) -> None:
    """Also null: a key that is there must be one, or the request might run twice."""
    with pytest.raises(InvalidParams, match="1 to 256"):
        request_key({REQUEST_KEY_META: value})


@pytest.mark.parametrize(
    ("token", "read"),
    [("t", "t"), (7, 7), (0, 0), ("", ""), (None, None), (True, None), (1.5, None), ([], None)],
)
def test_a_progress_token_is_a_string_or_an_integer_or_is_not_there(
    token: object, read: object
) -> None:
    """A malformed one is the wrapped server's to refuse."""
    assert progress_token({"progressToken": token}) == read


@pytest.mark.parametrize("params", [None, {}, {"_meta": None}, {"_meta": []}, {"_meta": "x"}])
def test_metadata_that_is_no_object_is_none(params: dict[str, Any] | None) -> None:
    """Rule 3 follows: served as the bare server would."""
    assert meta_of(params) == {}


# --- what goes out -----------------------------------------------------------------------------


@given(IDS, OBJECTS)
def test_a_kept_outcome_is_the_same_answer_as_a_fresh_one(
    request_id: str | int, body: dict[str, Any]
) -> None:
    """KEY4: the same key again gets the one answer, under its own id."""
    assert decode_kept(result_outcome(body)) == {"result": body}
    assert decode_kept(error_outcome(body)) == {"error": body}
    assert decode(result_message(request_id, body)) == {
        "jsonrpc": "2.0",
        "id": request_id,
        "result": body,
    }


@given(TEXT, TEXT, st.none() | OBJECTS)
def test_what_is_written_is_read_as_it_was_meant(
    request_id: str, method: str, params: dict[str, Any] | None
) -> None:
    """Round trip; ``params`` is left out if it is None."""
    request = decode(request_message(request_id, method, params))
    notification = decode(notification_message(method, params))

    assert parse(request) == Request(request_id, method, params)
    assert parse(notification) == Notification(method, params)
    assert ("params" in request) == ("params" in notification) == (params is not None)


@given(OBJECTS)
def test_a_message_is_one_line(body: dict[str, Any]) -> None:
    """Messages over stdio and SSE are framed by line: no newline outlives the encoding."""
    encoded = result_message(1, body)

    assert b"\n" not in encoded and b"\r" not in encoded


def test_an_error_body_leaves_out_data_that_is_none() -> None:
    """And keeps data that is merely false."""
    assert error_body(-1, "no") == {"code": -1, "message": "no"}
    assert error_body(-1, "no", "") == {"code": -1, "message": "no", "data": ""}


def test_a_wire_error_becomes_its_code_message_and_data() -> None:
    """ERR1."""
    assert wire_error(SessionDetached()) == {"code": -31010, "message": "Session detached"}
    assert wire_error(LimitReached("max_sessions", 9)) == {
        "code": -31011,
        "message": "Limit reached",
        "data": {"limit": "max_sessions", "max": 9},
    }


# --- events ------------------------------------------------------------------------------------

EVENT_ID_MARKER = "\N{WORD JOINER}sessionEventId\N{WORD JOINER}"
SESSION_MARKER = "\N{WORD JOINER}sessionId\N{WORD JOINER}"
# Strings that hold what the template splits at, and what stands around it.
MARKERS = st.sampled_from(
    [
        EVENT_ID_MARKER,
        SESSION_MARKER,
        "\N{WORD JOINER}",
        '"},"sessionEventId":"',
        '{"sessionId":"',
        "\\",
        "sessionEventId",
        "sessionId",
        "_meta",
        SESSION_META,
    ]
)
TRICKY = st.lists(MARKERS | TEXT, max_size=4).map("".join) | MARKERS
TRICKY_JSON: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3),
    max_leaves=10,
)
TRICKY_PARAMS = st.none() | st.dictionaries(TRICKY, TRICKY_JSON, max_size=4)
SESSION_IDS = st.text(
    st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=60
).map(SessionId)


@given(TRICKY, TRICKY_PARAMS, SESSION_IDS)
@example("m", {"_meta": {SESSION_META: {"sessionId": "forged", "state": "forged"}}}, SessionId("s"))
@example("m", {"_meta": {SESSION_META: 1, "x": SESSION_MARKER}}, SessionId("s"))
@example("m", {"sessionEventId": 1, "x": EVENT_ID_MARKER}, SessionId("s"))
@example("m", {"_meta": "no object", "sessionEventId": "forged"}, SessionId('"\\'))
def test_a_spliced_event_is_the_event_encoded_whole(
    method: str, params: dict[str, Any] | None, session_id: SessionId
) -> None:
    """EVT6; whatever the sender's own strings hold."""
    plain = dict(params or {})
    sent_meta = plain.pop("_meta", None)
    meta = dict(cast(dict[str, Any], sent_meta)) if isinstance(sent_meta, dict) else {}
    meta[SESSION_META] = {"sessionId": session_id}
    expected = {**plain, "_meta": meta, "sessionEventId": EVENT_ID}

    draft = EventTemplate(method, params, None).draft(session_id)
    encoded = draft.encode(EVENT_ID)

    assert orjson.loads(encoded) == {"jsonrpc": "2.0", "method": method, "params": expected}
    assert len(encoded) == len(encode({"jsonrpc": "2.0", "method": method, "params": expected}))


@pytest.mark.parametrize("value", RARE, ids=["large", "low", "surrogate", "inner"])
def test_an_event_may_hold_what_orjson_refuses(value: object) -> None:
    """``encode`` writes it, so a template must be able to split it."""
    encoded = EventTemplate("m", {"value": value}, None).draft(SessionId("s")).encode(EVENT_ID)

    event = json.loads(encoded)
    assert event["params"]["value"] == value
    assert event["params"]["sessionEventId"] == EVENT_ID
    assert event["params"]["_meta"][SESSION_META] == {"sessionId": "s"}


@given(TRICKY_PARAMS)
def test_an_event_holds_its_senders_session_and_never_state(params: dict[str, Any] | None) -> None:
    """EVT6: never ``state``."""
    event = json.loads(EventTemplate("m", params, None).draft(SessionId("s")).encode(EVENT_ID))

    assert event["params"]["_meta"][SESSION_META] == {"sessionId": "s"}
    assert event["params"]["sessionEventId"] == EVENT_ID


@given(TRICKY, TRICKY_PARAMS, SESSION_IDS, SESSION_IDS)
def test_one_template_serves_many_sessions(
    method: str, params: dict[str, Any] | None, one: SessionId, two: SessionId
) -> None:
    """SEC7: nothing of the one session is left in the event of the other."""
    template = EventTemplate(method, params, "key")
    first = template.draft(one)

    assert template.draft(two) == EventTemplate(method, params, "key").draft(two)
    assert template.draft(one) == first
    assert (first.key, first.origin) == ("key", None)


def test_a_template_leaves_the_senders_params_alone() -> None:
    """They are encoded, not taken over."""
    params = {"uri": "note://1", "_meta": {"mine": 1, SESSION_META: None}, "sessionEventId": 7}
    before = json.dumps(params)

    EventTemplate("notifications/resources/updated", params, None).draft(SessionId("s"))

    assert json.dumps(params) == before


def test_a_plain_draft_is_the_message_itself() -> None:
    """A bare connection's messages carry an SSE id and nothing of ours."""
    draft = plain_draft(b"{}", "key")

    assert draft.encode(EVENT_ID) == b"{}"
    assert (draft.key, draft.origin) == ("key", None)


def kept_as_draft(message: bytes) -> object:
    draft: Draft = plain_draft(message)
    return draft.encode(SessionEventId("1-1"))


def kept_under_a_key(message: bytes) -> object:
    keys = RequestKeys(lifetime=60, max_bytes=100_000)
    keys.begin(KeyUse(RequestKey("k"), b"digest", "here"), now=0)
    assert keys.finish(RequestKey("k"), message, now=0)
    return keys


@pytest.mark.parametrize("kept", [kept_as_draft, kept_under_a_key])
def test_what_is_kept_takes_the_memory_that_is_counted(kept: Callable[[bytes], object]) -> None:
    """A bound in bytes bounds the memory too."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        everything = [kept(encode({"text": "x" * 4_000})) for _ in range(100)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(everything) == 100
    assert after - before < 100 * 6_000


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ({"id": 7, "method": "ping"}, {"code": -32600, "message": "Invalid request: too long"}),
        ({"id": "a", "result": 1}, {"code": -32700, "message": "Invalid answer: too long"}),
    ],
)
def test_a_refused_value_with_an_id_is_answered(value: Any, error: dict[str, Any]) -> None:
    answer = {"jsonrpc": "2.0", "id": value["id"], "error": error}
    assert answer_instead_of(value, "too long") == answer


@pytest.mark.parametrize("value", [{"method": "ping"}, {"id": None}, {"id": 1.5}, [], "text"])
def test_a_refused_value_without_an_id_is_not_answered(value: object) -> None:
    assert answer_instead_of(value, "too long") is None
