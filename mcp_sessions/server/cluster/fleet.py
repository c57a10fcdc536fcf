"""Ask all replicas what they do: for the page, while somebody looks at it.

A replica that does not answer in time is left out: whether it lives is another question.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.server.cluster.replica import ClusterBus
from mcp_sessions.server.cluster.replica_messages import (
    Describe,
    Description,
    Instruct,
    ReplicaMessage,
)

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]

Describes = Callable[[SessionId | None], Awaitable[Facts]]
"""Says what this process does, or what it knows of one session."""

_WITHIN = 0.5
"""Seconds that a replica has for its answer."""

_MOST = 200
"""Replicas whose answers are kept."""


@dataclass(slots=True)
class _Answers:
    others: frozenset[str] | None
    """Those that are waited for."""

    facts: dict[str, Facts] = field(default_factory=dict[str, Facts])
    are_all_there: asyncio.Event = field(default_factory=asyncio.Event)


class Fleet:
    """The replicas behind a store.

    Args:
        own: What this process says of itself. None: it serves nothing.
    """

    hint = ""

    def __init__(self, bus: ClusterBus, own: Describes | None) -> None:
        self._bus, self._own = bus, own
        self.acts: dict[str, Callable[[int], Awaitable[object]]] = {}
        """What this process can be asked to do."""

        self._asked: dict[str, _Answers] = {}
        """By the names of the questions that are open."""

        self._others: frozenset[str] | None = None
        """Those that answered last. None: nobody was asked."""

    def hold(self, task: asyncio.Task[Any]) -> None:
        self._bus.hold(task)

    async def look(self) -> Sequence[Facts]:
        return await self._answers_of(None)

    async def latest_method(self, session_id: SessionId) -> str | None:
        """The method of the newest request of a session that a replica runs or ran."""
        found = [each.get("latest") for each in await self._answers_of(session_id)]
        return max((tuple(each) for each in found if each), default=(0, None))[1]

    async def _answers_of(self, session_id: SessionId | None) -> Sequence[Facts]:
        ask, asked = secrets.token_hex(8), _Answers(self._others)
        own: list[Facts] = []
        self._asked[ask] = asked
        try:
            if self._bus.is_shared:
                await self._bus.try_send(Describe(ask=ask, session_id=session_id))
            if self._own is not None:
                own = [await self._own(session_id)]
            if self._bus.is_shared and (session_id is None or self._others != frozenset()):
                # Those of the last look; who is new has until then.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_WITHIN):
                        await asked.are_all_there.wait()
        finally:
            del self._asked[ask]
        if session_id is None:
            self._others = frozenset(asked.facts)
        return [*own, *asked.facts.values()]

    async def is_alive(self, process: str) -> bool | None:
        try:
            return await self._bus.is_alive(process)
        except StoreUnavailable:
            return None

    def answered(self, sender: str, message: Description) -> None:
        asked = self._asked.get(message.ask)
        if asked is not None and len(asked.facts) < _MOST:
            asked.facts[sender] = message.facts
            if asked.others and asked.others <= asked.facts.keys():
                asked.are_all_there.set()

    async def instruct(self, process: str, message: Instruct) -> bool:
        """Let a replica do something; False if no process of that name may have heard it.

        Raises:
            StoreUnavailable: Unknown whether it was sent.
        """
        if process == self._bus.process and self._own is not None:
            await self.obey(message)
            return True
        return self._bus.is_shared and await self._bus.send(message, to=process)

    async def obey(self, message: Instruct) -> None:
        """Do what a page asks this process for. What a newer release asks is left out."""
        act = self.acts.get(message.what)
        if act is not None:
            logger.warning("an operator's page asks this process to %s", message.what)
            await act(message.pid)

    async def describe(self, sender: str, message: Describe) -> None:
        """Answer another process."""
        if self._own is not None:
            facts = await self._own(message.session_id)
            await self._bus.try_send(Description(ask=message.ask, facts=facts), to=sender)


class Visitor:
    """The :class:`~mcp_sessions.server.cluster.replica.Handlers` of a process that serves nothing,
    and only looks.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def handle(self, sender: str, message: ReplicaMessage) -> Coroutine[Any, Any, None] | None:
        if isinstance(message, Description):
            self._fleet.answered(sender, message)
        return None

    def missed(self) -> Coroutine[Any, Any, None] | None:
        return None

    async def session_ended(self, session_id: SessionId) -> None:
        """Nothing of it is here."""

    def round(
        self, carrying: Collection[SessionId]
    ) -> Sequence[Callable[[], Coroutine[Any, Any, None]]]:
        return ()
