"""Messages between replicas, as they stand in the store's exchange: two releases serve together
while one replaces the other.

``written_before.jsonl`` holds what replicas wrote when each kind was a dict, and of a younger kind
what the first release with it writes: its bytes are what another release reads and sends. From the
first release on they change only with the messages' version.
"""

import ast
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.errors import Detached
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.codec import (
    KINDS,
    REQUESTS,
    MalformedMessage,
    OtherVersion,
    decode,
    encode,
)
from mcp_sessions.server.cluster.replica_messages import (
    Ask,
    RelayedRequest,
    ReplicaMessage,
    ServerChanged,
)
from mcp_sessions.server.dispatch import cluster_handlers
from mcp_sessions.stores.records import Peer

BEFORE = (Path(__file__).parent / "written_before.jsonl").read_bytes().splitlines()

YOUNGER = {
    "alive": {"newest", "lacks"},
    "change": {"id"},
    "client": {"id"},
    "describe": {"session"},
    "displaced": {"instance"},
    "result": {"updates"},
    "update": {"number"},
}
"""Kind → the members that were added to it, and that an older release does not send."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda some: st.lists(some, max_size=4) | st.dictionaries(st.text(), some, max_size=4),
    max_leaves=8,
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT | st.none()
OBJECTS = st.dictionaries(TEXT, TEXT | st.integers(-(2**63), 2**63 - 1), max_size=3)
st.register_type_strategy(Principal, st.builds(Principal, NAMES, NAMES, NAMES))
st.register_type_strategy(Peer, st.builds(Peer, TEXT, OBJECTS | st.none(), st.booleans()))


def made_of(kinds: Sequence[type[Any]], **of: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = dict.fromkeys(("params", "result", "error", "asks"), OBJECTS | st.none())
    members = {**objects, "client": OBJECTS, "message": OBJECTS, "facts": OBJECTS, **of}
    return st.sampled_from(kinds).flatmap(
        lambda kind: st.builds(
            kind,
            **{
                name: values
                for name, values in members.items()
                if name in inspect.signature(kind).parameters
            },
        )
    )


MESSAGES = made_of([*KINDS.values()], request=made_of([*REQUESTS.values()]))


def read(text: bytes) -> tuple[str, ReplicaMessage]:
    """Who sends a message that is known here, and the message."""
    notified = decode(text)
    assert notified is not None
    return notified


# --- two releases ------------------------------------------------------------------------------


def test_what_the_release_before_wrote_is_read_and_written_alike() -> None:
    """A replica of either release reads what one of the other sends."""
    for text in BEFORE:
        sender, message = read(text)
        assert encode(message, sender) == text


def test_members_that_an_older_release_does_not_send_have_defaults() -> None:
    for text in BEFORE:
        members = json.loads(text)
        younger = YOUNGER.get(members["kind"], ())
        older = {name: value for name, value in members.items() if name not in younger}
        assert read(json.dumps(older).encode())[1].kind == members["kind"]


def test_a_member_of_a_later_release_is_not_read() -> None:
    for text in BEFORE:
        assert read(text[:-1] + b',"later":{"a":1}}') == read(text)


def test_another_version_is_left_out() -> None:
    for text in BEFORE:
        with pytest.raises(OtherVersion) as other:
            decode(text.replace(b'"v":1', b'"v":2', 1))
        assert (other.value.sender, other.value.version) == (json.loads(text)["from"], 2)


def test_an_unknown_kind_is_left_out() -> None:
    assert decode(b'{"v":1,"kind":"later","from":"process-a"}') is None
    asked = (
        b'{"v":1,"kind":"ask","from":"process-a","ask":"a","within":null,"request":{"kind":"%s"}}'
    )
    assert decode(asked % b"later") is None
    with pytest.raises(MalformedMessage):
        decode(asked % b"join")


def test_a_message_without_one_of_its_members_is_malformed() -> None:
    """Also one that may be null: what a release forgot is not what it said."""
    for text in BEFORE:
        members = json.loads(text)
        for name in members.keys() - YOUNGER.get(members["kind"], set()):
            part = {other: value for other, value in members.items() if other != name}
            with pytest.raises(MalformedMessage):
                decode(json.dumps(part).encode())
                pytest.fail(f"{members['kind']} was read without {name}")


@pytest.mark.parametrize(
    ("member", "value"),
    [("session", 1), ("epoch", "1"), ("reason", "bored"), ("newer", []), ("from", None)],
)
def test_a_member_of_another_type_is_malformed(member: str, value: object) -> None:
    """And the refusal, which is logged, does not say what it holds."""
    members = next(json.loads(text) for text in BEFORE if b"displaced" in text)
    with pytest.raises(MalformedMessage) as refused:
        decode(json.dumps({**members, member: value}).encode())
    assert member in str(refused.value) and str(value) not in str(refused.value)


# --- every message -----------------------------------------------------------------------------


@given(MESSAGES, TEXT)
def test_a_message_is_read_as_it_was_written(message: ReplicaMessage, sender: str) -> None:
    text = encode(message, sender)
    who, read_message = read(text)
    assert (who, type(read_message)) == (sender, type(message))
    # JSON knows one kind of sequence, and a message may have another one.
    assert encode(read_message, who) == text


def test_numbers_beyond_64_bits_are_read_as_they_were_written() -> None:
    """They are in what a server announces, or a client reports."""
    message = ServerChanged(method="notifications/x", params={"n": 2**70})
    assert decode(encode(message, "process-a")) == ("process-a", message)


@given(JSON)
def test_any_json_is_read_or_refused(value: Any) -> None:
    assert is_read_or_refused(json.dumps(value).encode())


@given(st.sampled_from(BEFORE), st.data(), JSON)
def test_any_member_is_read_or_refused(text: bytes, data: st.DataObject, value: Any) -> None:
    members = json.loads(text)
    members[data.draw(st.sampled_from(sorted(members)))] = value
    assert is_read_or_refused(json.dumps(members).encode())


@given(st.binary())
def test_any_bytes_are_read_or_refused(text: bytes) -> None:
    assert is_read_or_refused(text)


def is_read_or_refused(text: bytes) -> bool:
    """Whether decoding ends with a value, or with the codec's own refusal."""
    try:
        decode(text)
    except Exception as failed:
        return isinstance(failed, (MalformedMessage, OtherVersion))
    return True


# --- the house ---------------------------------------------------------------------------------


def arms(source: str) -> set[str]:
    return {
        node.cls.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name)
    }


def test_every_message_has_an_arm_in_the_one_handler() -> None:
    names = {message.__name__ for message in (*get_args(ReplicaMessage), *get_args(RelayedRequest))}
    assert names == arms(inspect.getsource(cluster_handlers))


def test_every_message_has_an_example() -> None:
    messages = [json.loads(text) for text in BEFORE]
    assert {message["kind"] for message in messages} == KINDS.keys()
    asked = {message["request"]["kind"] for message in messages if message["kind"] == Ask.kind}
    assert asked == REQUESTS.keys()


def test_no_two_messages_are_of_one_kind() -> None:
    assert len(KINDS) == len(get_args(ReplicaMessage))
    assert len(REQUESTS) == len(get_args(RelayedRequest))


def test_every_reason_for_a_displacement_can_be_said() -> None:
    members = next(json.loads(text) for text in BEFORE if b"displaced" in text)
    for reason in Detached:
        sender, message = read(json.dumps({**members, "reason": reason.value}).encode())
        assert json.loads(encode(message, sender))["reason"] == reason.value
