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
6. An update waits until the exchange has it. It has a number: the sender takes it once, in order,
   and says in :class:`Alive` which one came last. What is missing is sent again. The result comes
   after the updates.
7. Updates that did not arrive, that wait for a slow client, or that are kept with a result, are
   bounded in bytes. The next update waits for room.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from mcp_sessions.core.messages import encode, wire_error
from mcp_sessions.errors import INTERNAL_ERROR, OutcomeUnknown, StoreUnavailable
from mcp_sessions.security import mint_request_id
from mcp_sessions.seldom import Seldom
from mcp_sessions.server.cluster.codec import understands
from mcp_sessions.server.cluster.pending import OnUpdate, Pending, RelayedOutcome, size_of
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
logger.addFilter(Seldom())

ALIVE_EVERY = 2.0
"""Seconds between two messages that ask for a request."""

_ARRIVES = 1.0
"""Seconds in which an update arrives. One that did not is sent again."""

_SILENT = 3 * ALIVE_EVERY
"""Seconds after which a silent sender is asked whether it still waits."""

_SENT_AGAIN = 0.25
"""Seconds after which a request is sent again to a process that does not listen."""

_DEAF = LIVENESS + 5.0
"""Seconds in which that process is seen to be dead, or to listen again."""

_LAST_WORDS = 1.0
"""Seconds for which messages of a process that died may still be under way."""

_UNREAD = 524_288
"""Bytes of updates of one request that are on their way. The next one waits."""

_KEPT = 1_000
"""Results that are kept: one may be lost on its way."""

_KEPT_BYTES = 8_388_608
"""Bytes of them."""

WITHIN_ENDED: Final = "the request within which it was asked has ended"
"""Why a request is cancelled, if its sender does not say so."""

_ASKER_ENDED = {"code": INTERNAL_ERROR, "message": "the request that asked is complete"}

Serve = Callable[["Asker", Any], Coroutine[Any, Any, RelayedOutcome]]
Work = Coroutine[Any, Any, None]


class Unserved(Exception):
    """The request did not run and never will, as its receiver says."""


class Unreachable(Unserved):
    """The request did not run: its receiver is dead, or speaks another version."""


class Deaf(Exception):
    """The request did not run: its receiver lives, and does not listen."""


class Unread:
    """Updates that their receiver did not confirm."""

    def __init__(self) -> None:
        self._updates: deque[tuple[Update, int]] = deque()
        self._sent_at: dict[int, float] = {}
        self.size = 0
        self.has_room = asyncio.Event()
        self.has_room.set()

    def add(self, update: Update) -> None:
        size = size_of(update)
        self._updates.append((update, size))
        self._sent_at[update.number] = asyncio.get_running_loop().time()
        self.size += size
        if self.size > _UNREAD:
            self.has_room.clear()

    def after(self, newest: int | None, arrives: float = 0.0) -> list[Update]:
        """Forget those up to the newest that came. Return those that have to be sent again.

        Args:
            newest: None: its sender does not count them, and lacks none.
            arrives: Seconds that an update may be on its way.
        """
        while self._updates and (newest is None or self._updates[0][0].number <= newest):
            update, size = self._updates.popleft()
            del self._sent_at[update.number]
            self.size -= size
        if self.size <= _UNREAD:
            self.has_room.set()
        now = asyncio.get_running_loop().time()
        lost = [u for u, _ in self._updates if self._sent_at[u.number] <= now - arrives]
        self._sent_at.update((update.number, now) for update in lost)
        return lost


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

    updates: int = 0
    """How many there were."""

    unread: Unread = field(default_factory=Unread, init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def update(self, message: Mapping[str, Any]) -> None:
        """Send a message that comes before the result. It is sent again until it arrived, and the
        later ones wait for it.
        """
        bus, process = self.relay.bus, self.process
        async with self._turn:
            await self.unread.has_room.wait()
            if self.is_gone:
                return
            update = Update(ask=self.name, message=message, number=self.updates + 1)
            # Before it is sent: who reports may be cancelled then, and its number is used.
            self.unread.add(update)
            self.updates += 1
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
        self.unread.has_room.set()

    def watch(self, on_listening: Callable[[bool], None]) -> None:
        """Call this each time that the client says whether it listens."""
        self._on_listening = on_listening

    def says(self, message: Alive) -> list[Update]:
        """Take what it says. Return the updates that it lacks."""
        self.asked_at = asyncio.get_running_loop().time()
        if self._on_listening is not None:
            self._on_listening(message.is_open)
        return self.unread.after(message.newest, 0.0 if message.lacks else _ARRIVES)

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
        self._kept: dict[str, tuple[Result, Unread, int]] = {}
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
        looks_at, is_dead = loop.time() + ALIVE_EVERY, False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(looks_at):
                    await pending.news.wait()
            pending.news.clear()
            is_due = loop.time() >= looks_at
            if is_dead or (pending.is_gone and pending.result is not None) or is_due:
                pending.looks(is_last=is_dead or pending.is_gone)
            await pending.pass_on()
            if pending.result is not None and pending.is_whole:
                return pending.result
            if pending.result is not None and (pending.is_gone or is_dead):
                # Nothing more comes.
                pending.news.set()
                continue
            if pending.is_gone:
                if not pending.is_repeatable:
                    raise OutcomeUnknown
                pending.is_sent()
                await self.bus.try_send(message, to=pending.process)
            if not is_due:
                continue
            if is_dead:
                raise OutcomeUnknown
            looks_at = loop.time() + ALIVE_EVERY
            if not await self._look(message.ask, pending):
                # The last messages of a process that is gone may still arrive.
                is_dead, looks_at = True, loop.time() + _LAST_WORDS

    async def _look(self, name: str, pending: Pending) -> bool:
        try:
            is_alive = await self.bus.is_alive(pending.process)
        except StoreUnavailable:
            # Asked again when the store is back.
            pending.looked = 0
            return True
        if is_alive:
            await self._says_alive(name, pending)
        return is_alive

    def _says_alive(self, name: str, pending: Pending) -> Work:
        alive = Alive(
            ask=name, is_open=pending.is_open, newest=pending.newest, lacks=bool(pending.early)
        )
        return self.bus.try_send(alive, to=pending.process)

    def listens(self, name: str, *, is_open: bool) -> None:
        """Say at once whether the client of a request listens; :class:`Alive` says it again."""
        pending = self._pending.get(name)
        if pending is not None:
            pending.listens(is_open)
            self.bus.spawn(self._says_alive(name, pending))

    def updated(self, sender: str, message: Update) -> Work | None:
        pending = self._asked_of(sender, message.ask)
        if pending is not None and pending.add(message):
            return self._says_alive(message.ask, pending)
        return None

    def answered(self, sender: str, message: Result) -> Work | None:
        pending = self._asked_of(sender, message.ask)
        if pending is not None and pending.end(message):
            return self._says_alive(message.ask, pending)
        return None

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
            return self._send_again(sender, message.ask, 0)
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
            task.cancel(WITHIN_ENDED)

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
                answered = Result(ask=asker.name, result=result, error=error, updates=asker.updates)
                self._keep(answered, asker.unread)
                # Nobody confirms what follows.
                asker.leaves()
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
            if asker.process != sender or not (lacks := asker.says(message)):
                return None
            return self._send_all(lacks, sender)
        if self._asked_of(sender, message.ask) is not None:
            return self._says_alive(message.ask, self._pending[message.ask])
        # It was answered, and that was lost; or it never came.
        if message.ask in self._kept:
            return self._send_again(sender, message.ask, message.newest)
        return self.bus.try_send(Gone(ask=message.ask), to=sender)

    def _send_again(self, sender: str, name: str, newest: int | None) -> Work:
        result, unread, _ = self._kept[name]
        return self._send_all([*unread.after(newest), result], sender)

    async def _send_all(self, messages: Sequence[Update | Result], to: str) -> None:
        for message in messages:
            await self.bus.try_send(message, to=to)

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

    def _keep(self, answered: Result, unread: Unread) -> None:
        said = answered.result if answered.result is not None else answered.error
        size = unread.size + (len(encode(said)) if said is not None else 0)
        if size > _KEPT_BYTES:
            return
        self._kept[answered.ask] = answered, unread, size
        self._kept_size += size
        while self._kept_size > _KEPT_BYTES or len(self._kept) > _KEPT:
            _, _, size = self._kept.pop(next(iter(self._kept)))
            self._kept_size -= size
