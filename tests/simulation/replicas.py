"""The replicas: layers that share a store, each a host that is killed, paused, stopped and started
again.
"""

import asyncio
from typing import Any, Final, cast

from starlette.types import ASGIApp

from mcp_sessions import SessionPolicy, SessionSecurity, TaskPolicy
from mcp_sessions.testing.timed_layer import ClockedLayer
from tests.simulation.chance import EPOCH
from tests.simulation.faults import StoreFaults
from tests.simulation.history import History
from tests.simulation.scheduler import Host
from tests.simulation.servers import Wrapped
from tests.support.replicas import Backplane, Member

_KEYS: Final = ["k" * 32]


class Replica:
    """One process that serves.

    Args:
        number: From 0.
        policy: Of its layer.
        tasks: Of its layer. None: no call becomes a task.
    """

    def __init__(
        self,
        number: int,
        backplane: Backplane,
        history: History,
        wrapped: Wrapped,
        policy: SessionPolicy,
        tasks: TaskPolicy | None = None,
    ) -> None:
        self.number = number
        self.skew = 0.0
        """Seconds that its clock is ahead."""

        self._backplane = backplane
        self._history = history
        self._wrapped = wrapped
        self._policy = policy
        self._tasks = tasks
        self.hosts: list[Host] = []
        """Its lives so far; the last one may live."""

        self.app: ASGIApp | None = None
        """None: nobody listens."""

        self.store_faults = StoreFaults(self.kill, self.pause)

    @property
    def host(self) -> Host:
        return self.hosts[-1]

    @property
    def chosen(self) -> tuple[ASGIApp, Host] | None:
        return (self.app, self.host) if self.app is not None and not self.host.is_dead else None

    async def start(self) -> None:
        """Start a process; return when it listens."""
        host = Host(f"replica {self.number}")
        self.hosts.append(host)
        ready = asyncio.Event()
        self._told_to_stop = asyncio.get_running_loop().create_future()
        self._life = host.starts(self._live(host, ready, self._told_to_stop))
        await ready.wait()

    async def stop(self, grace: float) -> bool:
        """SIGTERM. Return whether it ended by itself: it may be killed meanwhile.

        Args:
            grace: Seconds that what runs has to end.
        """
        self.app = None
        self._told_to_stop.set_result(grace)
        ended = asyncio.Event()
        self.host.at_death[ended] = ended.set
        self._life.add_done_callback(lambda _: ended.set())
        await ended.wait()
        if self._life.done():
            self._life.result()
        return self._life.done()

    async def _live(
        self, host: Host, ready: asyncio.Event, told_to_stop: "asyncio.Future[float]"
    ) -> None:
        store = self._backplane.store()
        self._member = store.exchange
        wrapped = self._wrapped.make(self._history, host)
        layer = ClockedLayer(
            wrapped.server,
            store=self.store_faults.over(store),
            policy=self._policy,
            tasks=self._tasks,
            security=SessionSecurity(_KEYS),
            clock=self._now,
        )
        wrapped.layer.append(layer)
        app = layer.asgi_app()
        async with layer.lifespan():
            self.app = cast(Any, app)
            ready.set()
            await layer.drain(await told_to_stop)
        self._history.add("stopped", replica=self.number)
        # The system closes what is still open.
        Host("what ends").enters(host.kill)

    def _now(self) -> float:
        return EPOCH + asyncio.get_running_loop().time() + self.skew

    def kill(self) -> None:
        """``kill -9``."""
        self._history.add("fault", kind="kill", replica=self.number)
        self.app = None
        self._member.died_at = asyncio.get_running_loop().time()
        self.host.kill()

    def pause(self) -> None:
        """SIGSTOP."""
        self.host.pause()
        self._member.silent_since = asyncio.get_running_loop().time()

    def resume(self) -> None:
        """SIGCONT."""
        if not self.host.is_dead:
            self._member.silent_since = None
            self.host.resume()

    @property
    def member(self) -> Member:
        """Its end of the messages between replicas."""
        return self._member
