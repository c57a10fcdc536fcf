"""Relay a request from one replica to another, and back: one protocol for each such conversation.

The request is an :class:`Ask`. The replica that serves it sends an :class:`Update` for each message
before its :class:`Result`. It may ask something itself meanwhile, *within* that request, or within
several requests of the same sender.

Rules:

1. A request is served once. The receiver knows it by its name, while it runs and afterwards. If
   the request comes again, the receiver sends its result again.
2. A request is sent once. From then on the sender asks for it: :class:`Alive`, every
   ``ALIVE_EVERY`` seconds. If the receiver does not know the request, it says :class:`Gone`. The
   outcome is unknown then, unless the request may be sent again.
3. A request lives as long as its sender waits. If the sender says :class:`Gone`, or its process
   dies, the receiver cancels the request. A sender that is silent is asked with :class:`Alive`
   too: its :class:`Gone` may be lost.
4. If nobody listens in the receiver's process, the request did not run. It is sent again while the
   process may be reconnecting. If the process is dead, or speaks another version of the messages,
   the sender knows that the request did not run.
5. Progress on a question is a request without a result, and its sender does not wait.
6. An update waits until the exchange has it. It has a number: the sender takes it once, in order.
   The result comes after the updates.
7. Updates that wait for a slow client, and results that are kept, are bounded in bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mcp_sessions.core.messages import encode, wire_error
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown, StoreUnavailable
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster.codec import understands
from mcp_sessions.server.cluster.pending import OnUpdate, Pending, RelayedOutcome
from mcp_sessions.server.cluster.replica import ClusterBus
from mcp_sessions.server.cluster.replica_messages import (
    Alive,
    Ask,
    ClientRequest,
    Gone,
    QuestionProgress,
    RelayedRequest,
    Result,
    Update,
)
from mcp_sessions.stores.exchange import LIVENESS

logger = logging.getLogger(__name__)

ALIVE_EVERY = 2.0
"""Seconds between two messages that ask for a request."""

_SILENT = 3 * ALIVE_EVERY
"""Seconds after which a silent sender is asked whether it still waits."""

_SENT_AGAIN = 0.25
"""Seconds after which a request is sent again to a process that does not listen."""

_DEAF = LIVENESS + 5.0
"""Seconds in which that process is seen to be dead, or to listen again."""

_LAST_WORDS = 1.0
"""Seconds for which messages of a process that died may still be under way."""

_KEPT = 1_000
"""Results that are kept: one may be lost on its way."""

_KEPT_BYTES = 8_388_608
"""Bytes of them."""

_ASKER_ENDED = {"code": INTERNAL_ERROR, "message": "the request that asked is complete"}

Serve = Callable[["Asker", Any], Coroutine[Any, Any, RelayedOutcome]]
Work = Coroutine[Any, Any, None]


class Unserved(Exception):
    """The request did not run and never will, as its receiver says."""


class Unreachable(Unserved):
    """The request did not run: its receiver is dead, or speaks another version."""


class Deaf(Exception):
    """The request did not run: its receiver lives, and does not listen."""


@dataclass(eq=False)
class Asker:
    relay: RequestRelay
    process: str
    name: str
    """The request's."""

    is_gone: bool = False
    """It does not wait any more."""

    asked_at: float = field(default_factory=lambda: asyncio.get_running_loop().time(), init=False)
    """When it last asked for its request, by the event loop's clock."""

    _on_listening: Callable[[bool], None] | None = None

    _updates: int = 0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def update(self, message: Mapping[str, Any]) -> None:
        """Send a message that comes before the result. It is sent again until it arrived, and the
        later ones wait for it.
        """
        bus, process = self.relay.bus, self.process
        async with self._turn:
            self._updates += 1
            update = Update(ask=self.name, message=message, number=self._updates)
            while not self.is_gone:
                try:
                    if await bus.send(update, to=process) or not await bus.is_alive(process):
                        return
                except StoreUnavailable as failed:
                    logger.warning("a message of a request waits for the store: %s", failed)
                await asyncio.sleep(_SENT_AGAIN)

    async def updates_sent(self) -> None:
        """Wait until the messages so far arrived."""
        async with self._turn:
            return

    def leaves(self) -> None:
        self.is_gone = True

    def watch(self, on_listening: Callable[[bool], None]) -> None:
        """Call this each time that the client says whether it listens."""
        self._on_listening = on_listening

    def says(self, *, is_open: bool) -> None:
        self.asked_at = asyncio.get_running_loop().time()
        if self._on_listening is not None:
            self._on_listening(is_open)

    async def ask(self, request: ClientRequest, on_update: OnUpdate) -> Result:
        """Ask it something within its request. This may be sent twice, and is served once.

        Raises:
            Unserved: Its process is gone.
            OutcomeUnknown: Its process died.
        """
        return await self.relay.ask(
            self.process, request, on_update, within=self.name, is_repeatable=True
        )


def _belongs_to(within: str | None, request: RelayedRequest) -> list[str]:
    """Return the requests within which it is asked, the best first. It ends with the last one."""
    about = reversed(request.about) if isinstance(request, ClientRequest) else ()
    return list(dict.fromkeys([within, *about])) if within is not None else []


class RequestRelay:
    def __init__(self, bus: ClusterBus) -> None:
        self.bus = bus
        self._pending: dict[str, Pending] = {}
        self._served: dict[str, tuple[Asker, type[RelayedRequest], asyncio.Task[None]]] = {}
        self._kept: dict[str, tuple[Result, int]] = {}
        self._kept_size = 0

    # --- where it is asked ----------------------------------------------------------------------

    async def ask(
        self,
        process: str,
        request: RelayedRequest,
        on_update: OnUpdate | None = None,
        *,
        serve: Serve | None = None,
        within: str | None = None,
        name: str | None = None,
        is_repeatable: bool = False,
    ) -> Result:
        """Have a request served by another process.

        Args:
            on_update: Takes each message that comes before the result. None: none does.
            serve: Serves what that process asks within the request.
            within: The request of that process that this belongs to.
            name: Names it for :meth:`listens`.
            is_repeatable: It may run twice, so it is sent again if it may be lost.

        Raises:
            Unserved: It did not run. Unreachable: That process is gone.
            Deaf: It did not run either, and that process lives.
            OutcomeUnknown: It may have run.
        """
        name = name or mint_request_id(self.bus.process)
        pending = Pending(
            process, set(_belongs_to(within, request)), is_repeatable, on_update, serve
        )
        self._pending[name] = pending
        message = Ask(ask=name, within=within, request=request)
        try:
            if not understands(process):
                raise Unreachable
            await self._send(message, pending)
            result = await self._result(message, pending)
        except BaseException:
            self.bus.spawn(self.bus.try_send(Gone(ask=name), to=process))
            raise
        finally:
            del self._pending[name]
            pending.stop()
        if result.result is None and result.error is None:
            raise Unserved
        return result

    async def notify(self, process: str, progress: QuestionProgress) -> None:
        """Send a request without a result, once. A failure is logged."""
        name = mint_request_id(self.bus.process)
        await self.bus.try_send(Ask(ask=name, within=None, request=progress), to=process)

    async def _send(self, message: Ask, pending: Pending) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + _DEAF
        try:
            while not await self.bus.send(message, to=pending.process):
                if pending.news.is_set():
                    return
                if not await self.bus.is_alive(pending.process):
                    raise Unreachable
                if loop.time() >= until:
                    if pending.is_repeatable:
                        return
                    raise Deaf
                await asyncio.sleep(_SENT_AGAIN)
        except StoreUnavailable as failed:
            # It may be there, and run.
            if not pending.is_repeatable:
                raise OutcomeUnknown from failed

    async def _result(self, message: Ask, pending: Pending) -> Result:
        loop = asyncio.get_running_loop()
        until: float | None = None
        while True:
            # The last messages of a process that is gone may still arrive.
            timeout = ALIVE_EVERY if until is None else max(0, until - loop.time())
            try:
                async with asyncio.timeout(timeout):
                    await pending.news.wait()
            except TimeoutError:
                if until is not None:
                    raise OutcomeUnknown from None
                if not await self._look(message.ask, pending):
                    until = loop.time() + _LAST_WORDS
            pending.news.clear()
            await pending.pass_on()
            if pending.result is not None and not pending.waiting:
                return pending.result
            if pending.is_gone:
                if not pending.is_repeatable:
                    raise OutcomeUnknown
                pending.is_sent()
                await self.bus.try_send(message, to=pending.process)

    async def _look(self, name: str, pending: Pending) -> bool:
        try:
            is_alive = await self.bus.is_alive(pending.process)
        except StoreUnavailable:
            # Asked again when the store is back.
            return True
        if is_alive:
            alive = Alive(ask=name, is_open=pending.is_open)
            await self.bus.try_send(alive, to=pending.process)
        return is_alive

    def listens(self, name: str, *, is_open: bool) -> None:
        """Say at once whether the client of a request listens; :class:`Alive` says it again."""
        pending = self._pending.get(name)
        if pending is not None:
            pending.listens(is_open)
            alive = Alive(ask=name, is_open=is_open)
            self.bus.spawn(self.bus.try_send(alive, to=pending.process))

    def updated(self, sender: str, message: Update) -> None:
        pending = self._asked_of(sender, message.ask)
        if pending is not None:
            pending.add(message)

    def answered(self, sender: str, message: Result) -> None:
        pending = self._asked_of(sender, message.ask)
        if pending is not None:
            pending.end(message)

    def _asked_of(self, process: str, name: str) -> Pending | None:
        pending = self._pending.get(name)
        return pending if pending is not None and pending.process == process else None

    # --- where it is served ---------------------------------------------------------------------

    def served(self, kind: type[RelayedRequest]) -> list[asyncio.Task[None]]:
        return [task for _, request, task in self._served.values() if request is kind]

    def asked(self, sender: str, message: Ask, serve: Serve | None) -> Work | None:
        """Serve a request of another process.

        Args:
            serve: Serves it, if it is not within a request of this process. None: nobody can.
        """
        if message.ask in self._served:
            return None
        if message.ask in self._kept:
            return self.bus.try_send(self._kept[message.ask][0], to=sender)
        belongs_to = _belongs_to(message.within, message.request)
        found = [self._asked_of(sender, name) for name in belongs_to]
        within = [pending for pending in found if pending is not None]
        if belongs_to:
            serve = within[0].serve if within else None
            if serve is None:
                ended = Result(ask=message.ask, result=None, error=_ASKER_ENDED)
                return self.bus.try_send(ended, to=sender)
        if serve is None:
            return self.bus.try_send(Gone(ask=message.ask), to=sender)
        asker = Asker(self, sender, message.ask)
        task = self.bus.spawn(self._serve(asker, serve, message.request, within[:1]))
        # Known from now on: it may be asked for before it has its first turn.
        self._served[asker.name] = asker, type(message.request), task
        for pending in within:
            pending.served[asker.name] = partial(self._left, pending, within, asker, task)
        task.add_done_callback(lambda _: self._finished(asker, within))
        return None

    def _left(
        self, pending: Pending, within: list[Pending], asker: Asker, task: asyncio.Task[None]
    ) -> None:
        within.remove(pending)
        if not within:
            asker.leaves()
            task.cancel()

    def _finished(self, asker: Asker, within: list[Pending]) -> None:
        self._served.pop(asker.name, None)
        for pending in within:
            pending.served.pop(asker.name, None)

    async def _serve(
        self, asker: Asker, serve: Serve, request: RelayedRequest, turn_of: Sequence[Pending]
    ) -> None:
        result: Mapping[str, Any] | None = None
        error: Mapping[str, Any] | None = None
        try:
            for pending in turn_of:
                await pending.turn()
            result, error = await serve(asker, request)
            await asker.updates_sent()
        except BaseException:
            error = wire_error(OutcomeUnknown())
            raise
        finally:
            self._end_within(asker)
            if not asker.is_gone and not isinstance(request, QuestionProgress):
                answered = Result(ask=asker.name, result=result, error=error)
                self._keep(answered)
                await self.bus.try_send(answered, to=asker.process)

    def _end_within(self, asker: Asker) -> None:
        for name, pending in self._pending.items():
            if asker.name not in pending.within:
                continue
            pending.within.remove(asker.name)
            if not pending.within:
                pending.end(Result(ask=name, result=None, error=_ASKER_ENDED))

    def asked_for(self, sender: str, message: Alive) -> Work | None:
        """Answer the other side of a request, which asks whether the request is known here."""
        if message.ask in self._served:
            asker = self._served[message.ask][0]
            if asker.process == sender:
                asker.says(is_open=message.is_open)
            return None
        if self._asked_of(sender, message.ask) is not None:
            # Its receiver asks, and gets the next message in time.
            return None
        # It was answered, and that was lost; or it never came.
        kept = self._kept.get(message.ask)
        return self.bus.try_send(kept[0] if kept is not None else Gone(ask=message.ask), to=sender)

    def gone(self, sender: str, message: Gone) -> None:
        pending = self._asked_of(sender, message.ask)
        if pending is not None:
            pending.is_unknown()
        elif message.ask in self._served:
            asker, _, task = self._served[message.ask]
            if asker.process == sender:
                asker.leaves()
                task.cancel()

    async def round(self) -> None:
        """Cancel the requests of processes that died. Ask the silent ones whether they wait.

        Raises:
            StoreUnavailable: The next round does the rest.
        """
        silent_since = asyncio.get_running_loop().time() - _SILENT
        for asker, kind, task in list(self._served.values()):
            if not await self.bus.is_alive(asker.process):
                asker.leaves()
                task.cancel()
            # The sender of progress does not wait, and would say Gone.
            elif kind is not QuestionProgress and asker.asked_at < silent_since:
                await self.bus.try_send(Alive(ask=asker.name, is_open=True), to=asker.process)

    def _keep(self, answered: Result) -> None:
        said = answered.result if answered.result is not None else answered.error
        size = len(encode(said)) if said is not None else 0
        if size > _KEPT_BYTES:
            return
        self._kept[answered.ask] = answered, size
        self._kept_size += size
        while self._kept_size > _KEPT_BYTES or len(self._kept) > _KEPT:
            _, size = self._kept.pop(next(iter(self._kept)))
            self._kept_size -= size
