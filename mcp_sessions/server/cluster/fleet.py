"""Ask all replicas what they do: for the page, while somebody looks at it.

A replica that does not answer in time is left out: whether it lives is another question.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
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

_WITHIN = 0.5
"""Seconds that a replica has for its answer."""

_MOST = 200
"""Replicas whose answers are kept."""


class Fleet:
    """The replicas behind a store.

    Args:
        own: What this process says of itself. None: it serves nothing.
    """

    hint = ""

    def __init__(self, bus: ClusterBus, own: Callable[[], Awaitable[Facts]] | None) -> None:
        self._bus, self._own = bus, own
        self.acts: dict[str, Callable[[int], Awaitable[object]]] = {}
        """What this process can be asked to do."""

        self._ask = ""
        self._answers: dict[str, Facts] = {}
        self._expected: frozenset[str] = frozenset()
        self._all_answered = asyncio.Event()

    def hold(self, task: asyncio.Task[Any]) -> None:
        self._bus.hold(task)

    async def look(self) -> Sequence[Facts]:
        self._ask, self._answers = secrets.token_hex(8), {}
        self._all_answered.clear()
        if self._bus.is_shared:
            await self._bus.try_send(Describe(ask=self._ask))
        own = [await self._own()] if self._own is not None else []
        if self._bus.is_shared:
            # Those of the last look; who is new has until then.
            with suppress(TimeoutError):
                async with asyncio.timeout(_WITHIN):
                    await self._all_answered.wait()
            self._expected = frozenset(self._answers)
        return [*own, *self._answers.values()]

    async def is_alive(self, process: str) -> bool | None:
        try:
            return await self._bus.is_alive(process)
        except StoreUnavailable:
            return None

    def answered(self, sender: str, message: Description) -> None:
        if message.ask == self._ask and len(self._answers) < _MOST:
            self._answers[sender] = message.facts
            if self._expected and self._expected <= self._answers.keys():
                self._all_answered.set()

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
            facts = await self._own()
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
