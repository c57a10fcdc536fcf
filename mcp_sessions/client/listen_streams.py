"""The application's ``subscriptions/listen`` streams over a session's one (modern era).

A session has one listen stream; an application may open several. On the wire there is one,
whose filter is what all of them ask together; the application's are made of it here, each
with its own acknowledgement, its own subscription id and its own part of the events.

Rules that must hold, and that ``tests/client/test_listen_streams.py`` owns:

1. An event reaches each of the application's streams that asked for it, once.
2. A stream that is cut on the wire is not cut for the application.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions import method_names
from mcp_sessions.client.dialer import Json
from mcp_sessions.client.requests import PendingRequest
from mcp_sessions.client.rpc import notification
from mcp_sessions.client.stamping import SUBSCRIPTION_ID, marked
from mcp_sessions.core.listen_messages import FLAGS
from mcp_sessions.core.messages import RequestId, encode, members_of, meta_of, texts_of

_FLAGS = {method_names.CHANGED[kind]: flag for kind, flag in FLAGS.items()}


def _filter_of(message: Json) -> Json:
    return members_of(members_of(message.get("params")).get("notifications"))


def _uris(wanted: Mapping[str, Any]) -> list[str]:
    return texts_of(wanted.get("resourceSubscriptions"))


@dataclass(slots=True)
class _Listening:
    request: PendingRequest
    wanted: Json
    is_acknowledged: bool = False

    def acknowledge(self, honored: Json) -> Json:
        self.is_acknowledged = True
        mine: Json = {
            flag: True for flag in _FLAGS.values() if self.wanted.get(flag) and honored.get(flag)
        }
        known = set(_uris(honored))
        uris = [uri for uri in _uris(self.wanted) if uri in known]
        if uris:
            mine["resourceSubscriptions"] = uris
        meta = {SUBSCRIPTION_ID: self.request.app_id}
        return notification(method_names.ACKNOWLEDGED, {"notifications": mine, "_meta": meta})


@dataclass(slots=True)
class Listens:
    wire_id: str | None = None
    """The id of the one on the wire; None: there is none."""

    _open: dict[RequestId, _Listening] = field(default_factory=dict[RequestId, _Listening])
    _on_wire: Json = field(default_factory=dict[str, Any])
    _honored: Json | None = None
    _count: int = 0

    def __bool__(self) -> bool:
        return bool(self._open)

    def add(self, request: PendingRequest) -> None:
        self._open[request.app_id] = _Listening(request, _filter_of(request.message))

    def remove(self, app_id: RequestId) -> bool:
        return self._open.pop(app_id, None) is not None

    def has(self, pending: PendingRequest) -> bool:
        known = self._open.get(pending.app_id)
        return known is not None and known.request is pending

    def cut(self) -> None:
        self.wire_id = None

    @property
    def is_answered(self) -> bool:
        return self._honored is not None

    def is_covered(self) -> bool:
        if self.wire_id is None:
            return False
        needed = self._union()
        flags = all(self._on_wire.get(flag) for flag in _FLAGS.values() if needed.get(flag))
        return flags and set(_uris(needed)) <= set(_uris(self._on_wire))

    def next_request(self) -> Json:
        """Build the listen request to send: the application's newest, with all filters."""
        self._count += 1
        self.wire_id = f"mcp-sessions-listen-{self._count}"
        self._on_wire, self._honored = self._union(), None
        newest = list(self._open.values())[-1].request.message
        params = {**cast("Json", newest.get("params") or {}), "notifications": self._on_wire}
        return {**newest, "id": self.wire_id, "params": params}

    def headers(self) -> Mapping[str, str]:
        return list(self._open.values())[-1].request.headers

    def _union(self) -> Json:
        union: Json = {}
        uris: dict[str, None] = {}
        for listening in self._open.values():
            for flag in _FLAGS.values():
                if listening.wanted.get(flag):
                    union[flag] = True
            uris.update(dict.fromkeys(_uris(listening.wanted)))
        if uris:
            union["resourceSubscriptions"] = list(uris)
        return union

    def acknowledged(self, params: Mapping[str, Any] | None) -> list[Json]:
        self._honored = members_of((params or {}).get("notifications"))
        return self.not_yet_acknowledged()

    def not_yet_acknowledged(self) -> list[Json]:
        """Return the acknowledgements for streams that the open request covers already."""
        honored = self._honored
        if honored is None or not self.is_covered():
            return []
        return [
            listening.acknowledge(honored)
            for listening in list(self._open.values())
            if not listening.is_acknowledged
        ]

    def largest(self) -> PendingRequest | None:
        fresh = [each for each in self._open.values() if not each.is_acknowledged]
        requests = [each.request for each in fresh or self._open.values()]
        return max(requests, key=lambda each: len(encode(each.message)), default=None)

    def is_acknowledgement(self, message: Json) -> bool:
        if message.get("method") != method_names.ACKNOWLEDGED or self.wire_id is None:
            return False
        meta = meta_of(cast("Json | None", message.get("params")))
        return meta.get(SUBSCRIPTION_ID) == self.wire_id

    def parts(self, message: Json) -> list[Json]:
        method = message.get("method")
        flag = _FLAGS.get(cast(str, method))
        uri = cast("Json", message.get("params") or {}).get("uri")
        exact = any(uri in _uris(listening.wanted) for listening in self._open.values())
        messages: list[Json] = []
        for app_id, listening in self._open.items():
            if flag is not None:
                wants = bool(listening.wanted.get(flag))
            elif method == method_names.RESOURCE_UPDATED:
                # A resource that no stream names is below one that a stream names. Only the server
                # knows below which.
                uris = _uris(listening.wanted)
                wants = uri in uris if exact else bool(uris)
            else:
                wants = True
            if wants and listening.is_acknowledged:
                messages.append(marked(message, {SUBSCRIPTION_ID: app_id}))
        return messages

    def everything(self) -> list[Json]:
        """Return one change for each filter after a gap, so that all is read again."""
        messages: list[Json] = []
        for app_id, listening in self._open.items():
            if not listening.is_acknowledged:
                continue
            messages.extend(
                marked(message, {SUBSCRIPTION_ID: app_id})
                for message in everything(listening.wanted)
            )
        return messages


def everything(wanted: Mapping[str, Any]) -> list[Json]:
    lists = [notification(method) for method, flag in _FLAGS.items() if wanted.get(flag)]
    return lists + [
        notification(method_names.RESOURCE_UPDATED, {"uri": uri}) for uri in _uris(wanted)
    ]
