"""A layer's lifespan: what it opens and runs while it serves, and in which order it stops.

Notice that the server of somebody else is told to stop: the server that runs our application.

ASGI tells an application only when every response has ended, and a stream ends with its server. So
each waits for the other. What a server is told is a signal. Rules, owned by
``tests/serve/test_stop_of_another_server.py``:

1. The handler of the server runs as before. Ours runs before it, and only notes the signal.
2. Where no handler stands for SIGTERM, no server ends gracefully, and none of ours is added. A
   server of ours drains by itself.
3. A server may put its handlers in place after the layer has started. It has done so when the first
   request comes.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from types import FrameType

from mcp_sessions import metrics
from mcp_sessions.background import Background
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.policy import DEFAULT_GRACE
from mcp_sessions.security import SessionSecurity
from mcp_sessions.serve.draining import Draining
from mcp_sessions.serve.sealing_key_file import take_keys
from mcp_sessions.serve.uvicorn_server import DrainingServer
from mcp_sessions.server.cluster.replica import Replica
from mcp_sessions.server.delivery.broadcaster import ChangeBroadcaster
from mcp_sessions.server.dispatch.cluster_handlers import ClusterHandlers
from mcp_sessions.server.dispatch.lifecycle import Lifecycle
from mcp_sessions.server.dispatch.own_facts import Gauges
from mcp_sessions.server.reporting.store_watch import StoreWatch
from mcp_sessions.server.requests.blocking import watched_loop
from mcp_sessions.server.requests.long_calls import LongSilences
from mcp_sessions.server.requests.tasks import Tasks
from mcp_sessions.server.upstream.handle_argument import HandleArgument
from mcp_sessions.server.upstream.port import Upstream
from mcp_sessions.stores.encrypted import check_is_open

logger = logging.getLogger(__name__)


_Handler = Callable[[int, FrameType | None], object]


class StopSignals:
    """Calls ``leave`` at the first SIGTERM or SIGINT, in the event loop."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._ours: dict[int, tuple[_Handler, _Handler]] = {}
        """Our handlers, and those before them."""

    def watch(self) -> None:
        """Add our handlers. Signals arrive in the main thread only: elsewhere there are none."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not callable(signal.getsignal(signal.SIGTERM)):
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if not callable(before) or isinstance(
                getattr(before, "__self__", None), DrainingServer
            ):
                continue
            ours = partial(self._handle, loop, before)
            self._ours[number] = ours, before
            signal.signal(number, ours)

    def close(self) -> None:
        """Take our handlers away, where nobody has put another one in place."""
        for number, (ours, before) in self._ours.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, before)

    def _handle(
        self,
        loop: asyncio.AbstractEventLoop,
        before: _Handler,
        number: int,
        frame: FrameType | None,
    ) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._leave)
        before(number, frame)


@dataclass(slots=True, eq=False, repr=False)
class Preparation:
    """Checks how a layer is set up before it serves.

    Args:
        argument: The argument that tools take for their session. None: they take none.
    """

    _replica: Replica
    _security: SessionSecurity
    _upstream: Upstream
    _: KW_ONLY
    argument: HandleArgument | None
    _store_is_open: bool = field(init=False, default=False)

    async def open_store(self) -> None:
        if not self._store_is_open:
            if self.argument is not None:
                listed = await self._upstream.listed_tools()
                if listed is not None:
                    self.argument.check(listed)
            store = self._replica.store
            await store.open(self._replica.policy)
            try:
                await check_is_open(store)
                await take_keys(store, self._security)
            except BaseException:
                await store.close()
                raise
            self._store_is_open = True

    def warn(self) -> None:
        store = self._replica.store
        if self._security.is_ephemeral and store.survives_process:
            logger.warning(
                "sessions outlive this process, but the keys that seal their state do not: "
                "set MCP_SESSIONS_KEYS to what `mcp-sessions keygen` prints"
            )
        is_lasting = store.remembers and store.survives_process
        if (self._replica.bus.is_shared or is_lasting) and self._upstream.keeps_state_in_memory:
            logger.warning(
                "FastMCP keeps what ctx.set_state stores in the memory of this process: other "
                "replicas do not see it, and after a restart it is gone while its session lives. "
                "Write FastMCP(..., session_state_store=mcp_sessions.fastmcp.session_state())"
            )


class Lifespan:
    def __init__(
        self,
        replica: Replica,
        preparation: Preparation,
        upstream: Upstream,
        *,
        handlers: ClusterHandlers,
        lifecycle: Lifecycle,
        silences: LongSilences,
        gauges: Gauges,
        store_watch: StoreWatch,
        broadcaster: ChangeBroadcaster,
        draining: Draining,
        tasks: Tasks | None,
    ) -> None:
        self._tasks = tasks
        self._store, self._bus = replica.store, replica.bus
        self._preparation, self.open_store = preparation, preparation.open_store
        self._upstream = upstream
        self._handlers = handlers
        self._lifecycle = lifecycle
        self._silences = silences
        self._gauges, self._store_watch = gauges, store_watch
        self._broadcaster = broadcaster
        self._draining, self._availability = draining, draining.availability
        self._background = Background()
        self._is_told_to_stop = False
        self._was_entered = False

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Everything happens inside.

        Raises:
            ConfigurationError: It runs, or ran, already; or not on asyncio; or see
                :meth:`Preparation.open_store`.
        """
        if self._was_entered:
            raise ConfigurationError("a SessionLayer runs once; make another one")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise ConfigurationError("a SessionLayer runs on asyncio, not on trio") from None
        self._was_entered = self._availability.is_running = True
        metrics.look_for_provider()
        await self.open_store()
        self._preparation.warn()
        try:
            async with self._upstream.lifespan():
                stop = self._upstream.on_change(self._broadcaster.announce)
                await self._bus.join(self._handlers)
                background = self._background
                background.loop("the rounds over expired sessions", self._lifecycle.run)
                background.loop("the watch over the store", self._store_watch.run)
                background.loop("the rounds over watched streams", self._bus.run)
                background.loop("the rounds over silent calls", self._silences.run)
                signals = StopSignals(self._leave)
                self._draining.arrivals.on_first = signals.watch
                if self._tasks is not None:
                    background.loop("the rounds over tasks", self._tasks.run)
                try:
                    with watched_loop(), metrics.observed(self._gauges.read):
                        yield
                finally:
                    signals.close()
                    stop()
                    await background.close()
                    await self._broadcaster.close()
                    await self._draining.stop()
                    await self._lifecycle.settle()
        finally:
            self._availability.is_running = False
            await self._store.close()

    def _leave(self) -> None:
        """Drain while the server of somebody else waits for its responses to end."""
        if not self._is_told_to_stop:
            self._is_told_to_stop = True
            logger.info("draining: the server that runs this application is told to stop")
            self._background.run("the drain at a signal", self._draining.drain(DEFAULT_GRACE))
