"""Where a conversation is played, once for each call of the store that may fail in it.

    played = await play(conversation, make_store=MemoryStore, fault=Fault(17, "after"))

What must hold after each is looked for here (`_check`); what must hold in the middle of it,
by the clients of `tests.support.persistent_clients`.
"""

import asyncio
import itertools
import logging
import traceback
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.ids import SessionId
from mcp_sessions.stores.contract import SessionStore
from tests.support.faulty_store import Fault, How, Plan, faulty
from tests.support.in_memory import MemoryPipe, MemorySocket
from tests.support.persistent_clients import (
    Duplex,
    HandshakeHttp,
    ModernHttp,
    PersistentClient,
    Violation,
    until,
)
from tests.support.raw import Json
from tests.support.world import Clock, Ctx, Toolbox, World, world

LIMIT = 900.0
"""Seconds that one conversation takes at the most, with all that goes wrong in it."""

DETACHED_TIMEOUT = 20.0
"""Of the policy: what nobody listens to is over after that."""

MakeStores = Callable[[], list[SessionStore]]
"""Makes the stores of as many processes as there are in a conversation."""


@dataclass
class Stage:
    worlds: list[World]
    cast: list[PersistentClient] = field(default_factory=list[PersistentClient])
    runs: Counter[str] = field(default_factory=Counter[str])
    """How often each named piece of work ran."""

    displaced: list[PersistentClient] = field(default_factory=list[PersistentClient])
    """The clients that must have been notified."""

    ended: list[str] = field(default_factory=list[str])
    """The sessions that were ended."""

    numbers: Any = field(default_factory=lambda: itertools.count(1))

    # --- who comes -----------------------------------------------------------------------------

    async def http(self, name: str, at: int = 0) -> HandshakeHttp:
        """A client of the handshake era over HTTP, connected."""
        client = HandshakeHttp(name, self.worlds[at].carrier)
        return await self._enter(client)

    async def modern(self, name: str, at: int = 0) -> ModernHttp:
        return await self._enter(ModernHttp(name, self.worlds[at].carrier))

    async def websocket(self, name: str, at: int = 0) -> Duplex:
        app = self.worlds[at].layer_app
        return await self._enter(Duplex(name, lambda: MemorySocket(app)))

    async def pipe(self, name: str, at: int = 0) -> Duplex:
        layer = self.worlds[at].layer
        return await self._enter(Duplex(name, lambda: MemoryPipe(layer)))

    async def _enter(self, client: Any) -> Any:
        self.cast.append(client)
        await client.connect()
        return client

    # --- what they do --------------------------------------------------------------------------

    async def work(self, client: PersistentClient, *, steps: int = 0) -> None:
        """A call with a key: it runs once at the most, and once if it is answered."""
        name = f"{client.name}/{next(self.numbers)}"
        result = await client.call("work", key=name, name=name, steps=steps)
        if self.runs[name] != 1 and (result is not None or self.runs[name]):
            raise Violation(f"{name} ran {self.runs[name]} times, and was answered {result}")
        if result is None and not self.runs[name]:
            raise Violation(f"{name} never ran, and its outcome is said to be unknown")

    async def gets_fresh(
        self, client: PersistentClient, *, of: PersistentClient | None = None
    ) -> None:
        """What happens from now on in its session comes to the client."""
        uri = f"fresh:{next(self.numbers)}"
        by = of or client
        if await by.call("update", key=uri, uri=uri) is None:
            uri = f"fresh:{next(self.numbers)}"
            if await by.call("update", key=uri, uri=uri) is None:
                raise Violation(f"{by.name}: two calls in a row have no outcome")
        await client.receives(uri)


@asynccontextmanager
async def staged(stores: list[SessionStore]) -> AsyncGenerator[Stage]:
    clock = Clock()
    async with AsyncExitStack() as stack:
        stage = Stage([])
        for store in stores:
            box = Toolbox()
            opened = world(
                store=store,
                box=box,
                clock=clock,
                detached_timeout=DETACHED_TIMEOUT,
                idle_timeout=1e6,
            )
            w = await stack.enter_async_context(opened)
            _add_tools(stage, w)
            stage.worlds.append(w)
        yield stage


def _add_tools(stage: Stage, w: World) -> None:
    async def work(ctx: Ctx, arguments: Json) -> str:
        """Count, report, and take longer than an answer in one piece may."""
        stage.runs[arguments["name"]] += 1
        for step in range(int(arguments["steps"])):
            await ctx.session.report_progress(step + 1, arguments["steps"])
            await _pass(0.2)
        return "done"

    async def announce(ctx: Ctx, arguments: Json) -> str:
        try:
            await w.layer.notify_resource_updated(arguments["uri"])
        except StoreUnavailable:
            return "sends it to the other sessions when the store is back"
        return "announced"

    async def update(ctx: Ctx, arguments: Json) -> str:
        """A session event. A handler is notified that it may not be stored, and tries again."""
        for _ in range(20):
            try:
                await ctx.session.send_resource_updated(arguments["uri"])
            except StoreUnavailable:
                await _pass(0.5)
            else:
                return "updated"
        raise AssertionError("an event could not be stored, ever")

    w.box.tools.update(work=work, announce=announce, update=update)


async def _pass(seconds: float) -> None:
    await asyncio.sleep(seconds)


Conversation = Callable[[Stage], Awaitable[None]]

Failing = Callable[[SessionStore, Plan], SessionStore]
"""Makes a store, not open yet, fail as planned."""


async def play(
    conversation: Conversation,
    make_stores: MakeStores,
    fault: Fault | None = None,
    *,
    failing: Failing = faulty,
) -> list[str]:
    """Play it, and look whether all is well; the store's calls, in order.

    Args:
        failing: Says which of them are counted, and fail.

    Raises:
        Violation: It is not.
    """
    plan = Plan(fault)
    with _errors() as errors:
        async with staged([failing(store, plan) for store in make_stores()]) as stage:
            plan.arm()
            try:
                async with asyncio.timeout(LIMIT):
                    await conversation(stage)
                plan.mend()
                await _check(stage)
            except TimeoutError as stuck:
                raise Violation(f"not over within {LIMIT} s") from stuck
            finally:
                plan.mend()
                for client in stage.cast:
                    client.give_up()
    if errors:
        raise Violation("\n".join(errors))
    return plan.calls


async def _check(stage: Stage) -> None:
    for client in stage.cast:
        client.check()
    for client in stage.displaced:
        # Notifications of the outage are sent when the store is back.
        await until(
            lambda c=client: c.was_taken_over or not c.is_listening,
            f"{client.name} is told that its session was taken over",
        )
    for client in stage.cast:
        if client.session in stage.ended or client.session is None:
            continue
        if client.is_listening and not client.is_taken_over:
            await stage.gets_fresh(client)
        client.check_events()
    for client in stage.cast:
        client.check()
        await client.leave()
    await _check_nothing_is_held(stage)


async def _check_nothing_is_held(stage: Stage) -> None:
    # What nobody listens to ends, and what was left undone is made good, in some rounds.
    await asyncio.sleep(DETACHED_TIMEOUT + 20)
    for w in stage.worlds:
        parts = cast(Any, w.inside)
        runner = parts.runner
        if runner.running or runner._detached:
            counts = f"{runner.running}, {len(runner._detached)} of them detached"
            raise Violation(f"requests still run: {counts}")
        if parts.questions._open:
            raise Violation(f"questions that nobody waits for: {parts.questions._open}")
        locked = [turn for turn in parts.attachments._session_locks.values() if turn.locked()]
        if locked:
            raise Violation("a session's lock is held for ever")
        alive = {connection.id for connection in parts.connections.all()}
        dead = [c for c in parts.connections.all() if c.kind != "http"]
        if dead:
            raise Violation(f"connections that are gone are kept: {dead}")
        for record in await w.layer.store.all_sessions():
            attachment = record.attachment
            if attachment is None or attachment.connection_id in alive:
                continue
            if await w.layer.store.load(SessionId(attachment.connection_id), now=0) is None:
                raise Violation("a session is attached to a connection that is gone")


@contextmanager
def _errors() -> Generator[list[str]]:
    """What the library logs that is no fault of the store's."""
    errors: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            failed = record.exc_info[1] if record.exc_info else None
            if failed is not None and not isinstance(failed, StoreUnavailable):
                errors.append(logging.Formatter().format(record))

    handler = Handler(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("mcp_sessions", "mcp_sessions_transports")]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield errors
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


async def failures(
    conversation: Conversation,
    make_stores: MakeStores,
    how: How,
    *,
    only: int | None = None,
    failing: Failing = faulty,
) -> tuple[int, list[str]]:
    """Play it once for each of its calls; how many times, and what went wrong in which.

    Args:
        only: Only this one fails.
        failing: See `play`.
    """
    calls = await play(conversation, make_stores, failing=failing)
    numbers = range(len(calls)) if only is None else [only]
    wrong: list[str] = []
    for number in numbers:
        try:
            played = await play(conversation, make_stores, Fault(number, how), failing=failing)
            if number >= len(played):
                raise Violation("it never came to this call: nothing failed")
        except Exception as failed:
            name = calls[number] if number < len(calls) else "?"
            notified = "".join(traceback.format_exception(failed)) if only is not None else ""
            wrong.append(
                f"{number} {name} {how}: {type(failed).__name__}: {failed!s:.600}\n{notified}"
            )
    return len(numbers), wrong
