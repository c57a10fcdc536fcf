"""Which request caused what a child says: the rule that keeps clients apart.

Several clients may share a child: those of one principal outside of sessions, or all with ``per``
``principal`` and ``shared``. Without authentication all clients are one principal, and strangers.

1. A change of the server (a list, a resource) is no request's. Its listeners hear it. Everything
   else that a child says is caused by one request: a question, a log message, progress, any other
   notification. It goes to the client of that request, and to nobody else.
2. The child may say which request: it says so on the response of that request, or by its progress
   token, its task or its elicitation.
3. If it does not say, exactly one request can be the cause: the only one that the child has not
   answered. Every method counts, and so does what the layer asks by itself. A request that was
   cancelled, or given up, counts until the child answers it. Two of the layer's own do not count,
   since nothing in them is a client's work: a ``subscriptions/listen``, and a ``logging/setLevel``
   that is given up.
4. If several can be the cause, nobody hears of it. A question is refused with an error that says
   why.
5. A child may say something about a request that it has answered: a task of its own runs on. So a
   request counts for :data:`LATE` seconds more against each that was open beside it, and for
   notifications against each that was sent meanwhile. These are dropped. A question is dropped so
   only if the child is known to ask late, since it asked while nothing was open. Else calls that
   follow each other closely would all be refused their questions. A request of the same client
   does not count: of the same session, or outside of sessions on the same connection.
   On a stream of its own, beside the responses, a URL may be behind its answers. There a
   notification is lost if any request was answered shortly before (:data:`BEHIND`).
6. If all who ask a child are one client (a session, or a connection outside of sessions), that
   client hears everything. A child that a session took over was others' before: for :data:`LATE`
   seconds after its last answer to them, only what says its request is passed on, and questions.
   All is passed on if the client's connection is still the same.
7. Only such a child is told the notifications of its client. A child of several clients is told
   none: what it says because of one would be taken for the work of another client's request.

``sharing.py`` has clients that can be asked share no child, so that rule 4 is rare. ``place.py``
does what this says. The property is tested by
``tests/server/upstream/external/test_cause.py``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from mcp_sessions.core.messages import RequestId, members_of, meta_of, progress_token
from mcp_sessions.core.nearness import own_connection
from mcp_sessions.server.upstream.port import Call

LATE: Final = 3.0
"""Seconds after an answer in which a child may say something about what it answered."""

BEHIND: Final = 1.0
"""Seconds in which a URL's own stream may be behind its responses."""

_ABOUT_NO_REQUEST: Final = ("/list_changed", "resources/updated", "roots/list")
"""How the methods end that a server calls at any time. It asks for roots when a client begins."""

_GIVEN_UP: Final = 1_024
"""Of one child: those that are given up and may still be answered. With more of them no request is
ever the only one again.
"""

_NAMES: Final = 64
"""Of one request: the elicitations of which its client is told that they are complete."""

TOKEN: Final = "progressToken"
_RELATED_TASK: Final = "io.modelcontextprotocol/related-task"
_TASK_STATUS: Final = "notifications/tasks/status"
_ELICITED: Final = "notifications/elicitation/complete"


def with_own_token(request_id: int, params: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """No token that a client wrote reaches a child. The child gives its token back, and several
    clients may share the child: the token could be that of another client's request.

    Returns:
        The params with the layer's token in place of the client's. A token that is no string and
        no integer is left out.
    """
    meta = meta_of(params)
    if meta is None or TOKEN not in meta:
        return params
    own = {name: value for name, value in meta.items() if name != TOKEN}
    if progress_token(params) is not None:
        own[TOKEN] = request_id
    return {**(params or {}), "_meta": own}


class Cause(NamedTuple):
    """What is known of the request that caused something."""

    said: Call | None = None
    """The child said that it is this one; None: it did not say."""

    only: Call | None = None
    """It can be no other than this one; None: it can."""

    may_be_others: bool = False
    """It may be one of before the child was the session's (``takeover.py``)."""

    @property
    def known(self) -> Call | None:
        """The request; None: unknown."""
        return self.said if self.said is not None else self.only


UNKNOWN: Final = Cause()


class Asked(Protocol):
    """A request, on whose response something is said."""

    @property
    def call(self) -> Call | None:
        """None: it is the layer's own."""
        ...


@dataclass(slots=True)
class _Request:
    call: Call | None
    """None: it is the layer's own."""

    names: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]])
    """By which the child may say that something is about it: its task, its elicitations."""

    follows: float = -math.inf
    """When the last one was answered before it was sent."""

    follows_others: float = -math.inf
    """When the last one of another session or connection was."""

    doubted_until: float = -math.inf
    """Until then the child may still say something about one that was open beside it."""


def _source_of(call: Call | None) -> Hashable:
    """The session that a request is in, else the connection that it came on; None: unknown."""
    if call is None or call.bound_session is not None:
        return call and call.bound_session
    scope = getattr(call.context, "scope", None)
    return scope["client"] if scope is not None else None


def _has_own_source(call: Call | None) -> bool:
    """Whether that session or connection is one client's."""
    if call is None or call.bound_session is not None:
        return call is not None
    scope = getattr(call.context, "scope", None)
    return scope is not None and own_connection(scope) is not None


class Unanswered:
    """The requests that one child was sent and has not answered."""

    def __init__(self) -> None:
        self._awaited: dict[RequestId, _Request] = {}
        self._given_up: set[RequestId] = set()
        self._is_lost = False
        self._answered_at = -math.inf
        """When the last one of a client was."""

        self._answered_to: Hashable = None
        """The session or connection of that one; None: unknown."""

        self._answered_to_others_at = -math.inf
        """When the last one was that was not of that session or connection."""

        self._asked_late: set[str] = set()
        """What the child asks after it answered: methods."""

        self._has_asked = False
        """The child asked its client for something, and knows the answer."""

        self._others_until = -math.inf
        """Until then the child may still say something because of requests of before it moved."""

        self._moved_from: Hashable = None
        """The connection of all those requests; None: there were several, or it is unknown."""

    def sent(self, request_id: RequestId, call: Call | None, params: object) -> None:
        """The child has it from now on."""
        request = self._awaited[request_id] = _Request(call)
        task: object = members_of(params).get("taskId")
        if isinstance(task, str):
            request.names.add(("task", task))
        source = _source_of(call)
        is_same = source is not None and source == self._answered_to
        request.follows = self._answered_at
        request.follows_others = self._answered_to_others_at if is_same else self._answered_at

    def answered(self, request_id: RequestId) -> None:
        """The child answered it, or never had it; also again, or long after it was given up."""
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
            if source is None or _source_of(other.call) != source:
                other.doubted_until = self._answered_at + LATE

    def given_up(self, request_id: RequestId) -> None:
        """Nobody waits for its answer any more. If it was answered this changes nothing."""
        if self._awaited.pop(request_id, None) is None:
            return
        if len(self._given_up) < _GIVEN_UP:
            self._given_up.add(request_id)
        else:
            self._is_lost = True

    @property
    def has_given_up(self) -> bool:
        """Whether the child may work on what nobody waits for."""
        return self._is_lost or bool(self._given_up)

    def moved(self) -> None:
        """The child serves a session from now on, whose client may be another one."""
        now = asyncio.get_running_loop().time()
        self._others_until = self._answered_at + LATE
        self._moved_from = self._answered_to if now - self._answered_to_others_at >= LATE else None

    def is_settled(self, *, is_late: bool) -> bool:
        """Whether the child said all that it says about its requests so far, and asked nothing
        because of them.

        Args:
            is_late: See :meth:`cause`.
        """
        if self._awaited or self.has_given_up or self._asked_late or self._has_asked:
            return False
        return not is_late or asyncio.get_running_loop().time() - self._answered_at >= BEHIND

    def cause(
        self,
        method: str,
        params: Mapping[str, Any] | None,
        about: Asked | None = None,
        *,
        is_late: bool = False,
    ) -> Cause:
        """The request that caused what the child says now.

        Args:
            about: The request on whose response it says so; None: on none.
            is_late: It may be said after the answer.
        """
        if about is not None:
            cause = Cause(said=about.call)
        else:
            name = _name_of(method, params)
            cause = self._named(name) if name is not None else self._only(method, is_late=is_late)
        if asyncio.get_running_loop().time() < self._others_until and not self._is_as_before():
            cause = cause._replace(may_be_others=True)
        self._has_asked = self._has_asked or not method.startswith("notifications/")
        elicitation: object = (params or {}).get("elicitationId")
        if isinstance(elicitation, str) and method == "elicitation/create":
            for request in self._awaited.values():
                is_cause = cause.known is not None and request.call is cause.known
                if is_cause and len(request.names) < _NAMES:
                    request.names.add(("elicitation", elicitation))
        return cause

    def _is_as_before(self) -> bool:
        """Whether all that is open is of the client that the child served before it moved."""
        return self._moved_from is not None and all(
            _source_of(each.call) == self._moved_from and _has_own_source(each.call)
            for each in self._awaited.values()
        )

    def _named(self, name: tuple[str, str]) -> Cause:
        # A task goes on after the answer of the request that began it, an elicitation as well: it
        # is not the only request's because that is the only one.
        found = [each.call for each in self._awaited.values() if name in each.names]
        return Cause(only=found[0]) if len(found) == 1 else UNKNOWN

    def _only(self, method: str, *, is_late: bool) -> Cause:
        now = asyncio.get_running_loop().time()
        if not (self._awaited or self.has_given_up or method.endswith(_ABOUT_NO_REQUEST)):
            if now - self._answered_at < LATE and len(self._asked_late) < _NAMES:
                self._asked_late.add(method)
        if self.has_given_up or len(self._awaited) != 1:
            return UNKNOWN
        if is_late and now - self._answered_at < BEHIND:
            return UNKNOWN
        (request,) = self._awaited.values()
        if now < request.doubted_until:
            return UNKNOWN
        is_question = not method.startswith("notifications/")
        may_be_late = not is_question or method in self._asked_late
        if may_be_late and now - request.follows < LATE:
            if not _has_own_source(request.call) or now - request.follows_others < LATE:
                return UNKNOWN
        return Cause(only=request.call)


def _name_of(method: str, params: Mapping[str, Any] | None) -> tuple[str, str] | None:
    """By which name a message of a child says what it is about; None: by none."""
    if method == _ELICITED:
        return _name("elicitation", (params or {}).get("elicitationId"))
    if method == _TASK_STATUS:
        return _name("task", (params or {}).get("taskId"))
    related: object = (meta_of(params) or {}).get(_RELATED_TASK)
    return _name("task", members_of(related).get("taskId")) if related is not None else None


def _name(kind: str, value: object) -> tuple[str, str]:
    # A client may name anything in its request. It cannot name what is no text.
    return (kind, value) if isinstance(value, str) else ("", "")
