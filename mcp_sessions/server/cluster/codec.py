"""How a message between replicas stands in the store's exchange: as a JSON object.

``{"v": 1, "kind": …, "from": …}`` and the message's members. Replicas of two releases serve
together while one replaces the other: what one does not know it leaves out, a member with a
default may be missing, and a member that is not known is not read. If a change needs more than
this, the version changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from types import UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from mcp_sessions.core import messages as json_rpc
from mcp_sessions.errors import Detached
from mcp_sessions.ids import version_of
from mcp_sessions.principal import Principal
from mcp_sessions.server.cluster.replica_messages import (
    Caller,
    RelayedRequest,
    ReplicaMessage,
)
from mcp_sessions.stores.records import Peer

VERSION = 1
"""A replica ignores the messages of another version. Each counts as gone for the other. Their
common data in the store stays valid.
"""

_WIRE_NAMES = {
    "session_id": "session",
    "connection_id": "connection",
    "fencing_epoch": "epoch",
    "protocol_version": "version",
    "initialize_params": "params",
}

_PARTS = (Caller, Peer)
"""Values whose members stand among the members of their message. All of them have to be there."""


class OtherVersion(Exception):
    def __init__(self, sender: str, version: int) -> None:
        super().__init__()
        self.sender = sender
        self.version = version

    def __str__(self) -> str:
        return f"version {self.version}"


class _UnknownRequest(Exception):
    """What another replica asks has a kind that this release does not know."""


class MalformedMessage(Exception):
    """A message that no replica of this version sends; the text says which member is wrong."""


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    wire_name: str
    type: Any
    classes: tuple[type, ...]
    """Those of a value that is read as it is. Empty: :func:`_read_special` reads it."""

    is_required: bool


def _classes(kind: Any) -> tuple[type, ...]:
    if kind in (Principal, Detached, RelayedRequest, *_PARTS):
        return ()
    if get_origin(kind) in (Union, UnionType):
        return tuple(each for one in get_args(kind) for each in _classes(one))
    if isinstance(kind, NewType):
        return _classes(kind.__supertype__)
    # JSON knows one kind of number.
    return (float, int) if kind is float else (get_origin(kind) or kind,)


def _members(message: type[Any]) -> list[_Member]:
    types = get_type_hints(message)
    return [
        _Member(
            field.name,
            _WIRE_NAMES.get(field.name, field.name),
            types[field.name],
            _classes(types[field.name]),
            field.default is MISSING or message in _PARTS,
        )
        for field in fields(message)
    ]


KINDS: Mapping[str, type[ReplicaMessage]] = {
    message.kind: message for message in get_args(ReplicaMessage)
}
"""Every message by its kind."""

REQUESTS: Mapping[str, type[RelayedRequest]] = {
    request.kind: request for request in get_args(RelayedRequest)
}
"""Every request of an ``Ask`` by its kind."""

_MEMBERS = {each: _members(each) for each in (*KINDS.values(), *REQUESTS.values(), *_PARTS)}


def understands(process: str) -> bool:
    return version_of(process) in (None, VERSION)


_PLAIN = (str, type(None), bool, int, dict)
"""Types of members that are written as they are."""


def encode(message: ReplicaMessage, sender: str) -> bytes:
    """A message as it is sent.

    Args:
        message: The message.
        sender: The process that sends it; empty: one that serves nothing.

    Raises:
        TypeError: A member holds what JSON cannot say.
    """
    members: dict[str, Any] = {"v": VERSION, "kind": message.kind, "from": sender}
    _write(message, members)
    return json_rpc.encode(members)


def _write(
    message: ReplicaMessage | RelayedRequest | Caller | Peer, members: dict[str, Any]
) -> None:
    for member in _MEMBERS[type(message)]:
        value = getattr(message, member.name)
        if member.type in _PARTS:
            _write(value, members)
        else:
            members[member.wire_name] = value if type(value) in _PLAIN else _written(value)


def decode(text: bytes) -> tuple[str, ReplicaMessage] | None:
    """Read a message and its sender; None: it, or what it asks, has an unknown kind.

    Raises:
        OtherVersion: It has another version.
        MalformedMessage: It is not a message, or a member is missing or has another type.
    """
    try:
        # A child's answer passes unchanged.
        members = json_rpc.decode_with_surrogates(text)
        version, kind = members["v"], members["kind"]
    except (ValueError, TypeError, LookupError) as failed:
        raise MalformedMessage("no JSON, or no version, or no kind") from failed
    if not isinstance(version, int) or not isinstance(kind, str):
        raise MalformedMessage("no JSON, or no version, or no kind")
    if version != VERSION:
        raise OtherVersion(str(members.get("from")), version)
    message = KINDS.get(kind)
    if message is None:
        return None
    if not isinstance(members.get("from"), str):
        raise _wrong("from")
    try:
        return members["from"], message(**_values(members, message))
    except _UnknownRequest:
        return None


def _values(members: Mapping[str, Any], message: type[Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for member in _MEMBERS[message]:
        name = member.wire_name
        if member.type in _PARTS:
            values[member.name] = member.type(**_values(members, member.type))
        elif name in members and not member.classes:
            values[member.name] = _read_special(members[name], name, member.type)
        elif name in members and isinstance(members[name], member.classes):
            values[member.name] = members[name]
        elif name in members or member.is_required:
            raise _wrong(name)
    return values


def _wrong(name: str) -> MalformedMessage:
    # Not what it holds: that may name a session.
    return MalformedMessage(f"{name!r} is missing or of another type")


def _written(value: object) -> object:
    match value:
        case Principal():
            return [value.client_id, value.issuer, value.subject]
        case Detached():
            return value.value
        case _ if isinstance(value, RelayedRequest):
            members: dict[str, Any] = {"kind": value.kind}
            _write(value, members)
            return members
        case _:
            return value


def _read_special(value: Any, name: str, kind: Any) -> Any:
    try:
        if kind is Principal:
            client_id, issuer, subject = value
            if all(isinstance(each, str | None) for each in value):
                return Principal(client_id, issuer, subject)
        elif kind is Detached:
            return Detached(value)
        else:
            request = REQUESTS.get(value["kind"])
            if request is not None:
                return request(**_values(value, request))
            raise _UnknownRequest
    except (KeyError, TypeError, ValueError):
        pass
    raise _wrong(name)
