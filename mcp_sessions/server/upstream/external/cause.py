"""Find the request that caused a message of a child: the rule that keeps clients apart.

Several clients may share a child: those of one principal outside of sessions, or all with ``per``
``principal`` and ``shared``. Without authentication all clients are one principal, and strangers.

1. A change of the server (a list, a resource) belongs to no request. Its listeners get it. One
   request causes any other message of a child: a question, a log message, progress, any other
   notification. It goes to the client of that request, and to no other.
2. The child may name the request. It does so on the response of that request, or by its progress
   token, its task or its elicitation.
3. If the child names none, exactly one request can be the cause: the only one that the child has
   not answered. Every method counts, and so do the layer's own requests. A request that was
   cancelled, or given up, counts until the child answers it. Two of the layer's own do not count,
   since nothing in them is a client's work: a ``subscriptions/listen``, and a ``logging/setLevel``
   that is given up.
4. If several requests can be the cause, no client gets the message. A question is refused with an
   error that says why.
5. A child may send a message about a request that it has answered, since a task of its own runs on.
   So an answered request counts for :data:`LATE` seconds more against each request that was open
   at the same time. If the child is known to send messages of a method late, it counts against each
   request that was sent meanwhile, too. The child is known to do so once it sent one while no
   request was open. Otherwise calls that follow each other closely would lose their questions and
   log messages. A request of the same client does not count: of the same session, or outside of
   sessions on the same connection, if no proxy shows. If notifications have a stream of their own,
   apart from the responses, a URL may send them after its answers. Such a notification is lost if
   any request was answered shortly before (:data:`BEHIND`).
6. If only one client (a session, or a connection outside of sessions) asks a child, that client
   gets every message.
7. Only such a child gets the notifications of its client. A child of several clients gets none: a
   message caused by a notification would be taken for the work of another client's request.

``sharing.py`` gives clients that can be asked no common child, so that rule 4 is rare. ``slot.py``
applies these rules. ``tests/server/upstream/external/test_cause.py`` tests the property.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from mcp_sessions import method_names
from mcp_sessions.core.messages import RequestId, members_of, meta_of, progress_token
from mcp_sessions.core.nearness import own_connection
from mcp_sessions.server.upstream.port import UpstreamCall

LATE: Final = 3.0
"""Seconds after an answer in which a child may still send messages about the request."""

BEHIND: Final = 1.0
"""Seconds by which a URL's own stream may be behind its responses."""

_ABOUT_NO_REQUEST: Final = (
    method_names.LIST_CHANGED,
    method_names.RESOURCE_UPDATED,
    method_names.LIST_ROOTS,
)
"""Endings of the methods that a server calls at any time. It asks for roots when a client
begins.
"""

_GIVEN_UP: Final = 1_024
"""Requests of a child, at most, that were given up and may still be answered. With more of them no
request is ever the only one again.
"""

_NAMES: Final = 64
"""Elicitations of one request, at most, whose completion is reported to its client."""

TOKEN: Final = "progressToken"
_RELATED_TASK: Final = "io.modelcontextprotocol/related-task"


def with_own_token(request_id: int, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Replace a client's progress token. The child gives its token back, and several clients may
    share the child. So the client's token could be that of another client's request.

    Returns:
        The params with the layer's token in place of the client's. A token that is no string and no
        integer is left out.
    """
    meta: Mapping[str, Any] | None = params.get("_meta") if params else None
    if not isinstance(meta, dict) or TOKEN not in meta:
        return params
    own = {name: value for name, value in meta.items() if name != TOKEN}
    if progress_token(meta) is not None:
        own[TOKEN] = request_id
    return {**(params or {}), "_meta": own}


class Cause(NamedTuple):
    said: UpstreamCall | None = None
    """Request that the child named. None: it named none."""

    only: UpstreamCall | None = None
    """Request that is the only possible one. None: others are possible."""

    @property
    def known(self) -> UpstreamCall | None:
        return self.said if self.said is not None else self.only


UNKNOWN: Final = Cause()


class SentRequest(Protocol):
    @property
    def call(self) -> UpstreamCall | None:
        """Return the call. None: the request is the layer's own."""
        ...


@dataclass(slots=True)
class _Request:
    call: UpstreamCall | None
    """None: the request is the layer's own."""

    names: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """Names by which the child may refer to it: its task, its elicitations."""

    follows: float = -math.inf
    """Time of the last answer before this request was sent."""

    follows_others: float = -math.inf
    """Time of the last answer to another session or connection before this request was sent."""

    doubted_until: float = -math.inf
    """Until then the child may still send messages about a request that was open at the same
    time.
    """


def _source_of(call: UpstreamCall | None) -> Hashable:
    if call is None or call.conversation_session is not None:
        return call and call.conversation_session
    scope = getattr(call.context, "scope", None)
    return scope["client"] if scope is not None else None


def _has_own_source(call: UpstreamCall | None) -> bool:
    if call is None or call.conversation_session is not None:
        return call is not None
    scope = getattr(call.context, "scope", None)
    return scope is not None and own_connection(scope) is not None


class UnansweredRequests:
    def __init__(self) -> None:
        self._awaited: dict[RequestId, _Request] = {}
        self._given_up: set[RequestId] = set()
        self._is_lost = False
        self._answered_at = -math.inf
        """Time of the last answer to a client."""

        self._answered_to: Hashable = None
        """Session or connection of the last answer. None: unknown."""

        self._answered_to_others_at = -math.inf
        """Time of the last answer to any other session or connection."""

        self._said_late: set[str] = set()
        """Methods of messages that the child sent after it had answered."""

        self._has_asked = False
        """Whether the child asked its client for something, and knows the answer."""

    def sent(
        self, request_id: RequestId, call: UpstreamCall | None, params: Mapping[str, Any] | None
    ) -> None:
        request = self._awaited[request_id] = _Request(call)
        task: object = params.get("taskId") if params is not None else None
        if isinstance(task, str):
            request.names.add(("task", task))
        source = _source_of(call)
        is_same = source is not None and source == self._answered_to
        request.follows = self._answered_at
        request.follows_others = self._answered_to_others_at if is_same else self._answered_at

    def answered(self, request_id: RequestId) -> None:
        """Note that the child answered a request, or never got it. This may come again, or long
        after it was given up.
        """
        was_given_up = request_id in self._given_up
        self._given_up.discard(request_id)
        request = self._awaited.pop(request_id, None)
        call = request.call if request is not None else None
        if call is None and not was_given_up:
            return
        source = _source_of(call)
        if source is None or source != self._answered_to:
            self._answered_to_others_at = self._answered_at
        self._answered_to, self._answered_at = source, asyncio.get_running_loop().time()
        for other in self._awaited.values():
            if not (_source_of(other.call) == source and _has_own_source(other.call)):
                other.doubted_until = self._answered_at + LATE

    def given_up(self, request_id: RequestId) -> None:
        """Note that no client waits for the answer any more. After the answer this changes
        nothing.
        """
        if self._awaited.pop(request_id, None) is None:
            return
        if len(self._given_up) < _GIVEN_UP:
            self._given_up.add(request_id)
        else:
            self._is_lost = True

    @property
    def has_given_up(self) -> bool:
        return self._is_lost or bool(self._given_up)

    def is_settled(self, *, is_late: bool) -> bool:
        """Whether the child sent all messages about its requests so far, and asked nothing because
        of them.

        Args:
            is_late: See :meth:`cause`.
        """
        if self._awaited or self.has_given_up or self._said_late or self._has_asked:
            return False
        return not is_late or asyncio.get_running_loop().time() - self._answered_at >= BEHIND

    def cause(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        about: SentRequest | None = None,
        *,
        is_late: bool = False,
    ) -> Cause:
        """Find the request that caused a message that comes now.

        Args:
            about: The request on whose response the message comes. None: on none.
            is_late: Whether the message may come after the answer.
        """
        if about is not None:
            cause = Cause(said=about.call)
        else:
            name = _name_of(method, params)
            cause = self._named(name) if name is not None else self._only(method, is_late=is_late)
        self._has_asked = self._has_asked or not method.startswith(method_names.NOTIFICATION)
        elicitation: object = (params or {}).get("elicitationId")
        if isinstance(elicitation, str) and method == method_names.ELICIT:
            for request in self._awaited.values():
                is_cause = cause.known is not None and request.call is cause.known
                if is_cause and len(request.names) < _NAMES:
                    request.names.add(("elicitation", elicitation))
        return cause

    def _named(self, name: tuple[str, str]) -> Cause:
        # A task continues after the answer of the request that began it, and so does an
        # elicitation. So the only open request is not the cause for that reason alone.
        found = [each.call for each in self._awaited.values() if name in each.names]
        return Cause(only=found[0]) if len(found) == 1 else UNKNOWN

    def _only(self, method: str, *, is_late: bool) -> Cause:
        now = asyncio.get_running_loop().time()
        if not (self._awaited or self.has_given_up or method.endswith(_ABOUT_NO_REQUEST)):
            if now - self._answered_at < LATE and len(self._said_late) < _NAMES:
                self._said_late.add(method)
        if self.has_given_up or len(self._awaited) != 1:
            return UNKNOWN
        if is_late and now - self._answered_at < BEHIND:
            return UNKNOWN
        (request,) = self._awaited.values()
        if now < request.doubted_until:
            return UNKNOWN
        if method in self._said_late and now - request.follows < LATE:
            if not _has_own_source(request.call) or now - request.follows_others < LATE:
                return UNKNOWN
        return Cause(only=request.call)


def _name_of(method: str, params: Mapping[str, Any] | None) -> tuple[str, str] | None:
    if method == method_names.ELICITED:
        return _name("elicitation", (params or {}).get("elicitationId"))
    if method == method_names.TASK_STATUS:
        return _name("task", (params or {}).get("taskId"))
    related: object = meta_of(params).get(_RELATED_TASK)
    return _name("task", members_of(related).get("taskId")) if related is not None else None


def _name(kind: str, value: object) -> tuple[str, str]:
    # A client may give anything as a name. A value that is not text gets a name that no request
    # has.
    return (kind, value) if isinstance(value, str) else ("", "")
