"""A real Redis where time jumps: it stands still while anything is on its way to or from it.

    with redis_wire() as wire:
        await play(conversation, redis_stores, Fault(17, "cut"), failing=wire.failing)

1. A connection that is being made, a command that is not answered and a subscription that is not
   confirmed are work of another process (see `VirtualTimeLoop`): no timeout of the store's runs out
   while its server does what it is asked to.
2. A message that was published is received before time goes on: when all commands are answered,
   each connection that subscribes is asked for an answer, too, and messages come before it.

The library knows nothing of it.

What fails is a command, where the stores of `tests.support.faulty_store` fail as a whole: between
two commands of one method as well. There is one more way: ``cut``: it is executed, and with its
answer all connections break, whatever else was on its way.
"""

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from redis.exceptions import ConnectionError as ConnectionBroke
from redis.exceptions import ResponseError

from mcp_sessions.policy import SessionPolicy
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.redis import redis_store as redis
from mcp_sessions.stores.redis.commands import SCRIPTS
from mcp_sessions.stores.redis.redis_connection import (
    Connection,
    MakeConnection,
    Value,
    connections_to,
)
from mcp_sessions.stores.redis.redis_store import RedisStore
from tests.support.faulty_store import Plan
from tests.support.redis_server import asked, name_of
from tests.support.virtual_time import VirtualTimeLoop

_SUBSCRIPTIONS = ("SUBSCRIBE", "UNSUBSCRIBE")


@contextmanager
def redis_wire() -> Generator["Wire"]:
    """Until the block ends, stores in Redis are made with connections that time waits for."""
    wire = Wire()

    def watched_connections_to(url: str, timeout: float) -> MakeConnection:
        make = connections_to(url, timeout)
        return lambda: _Watched(make(), wire)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis, "connections_to", watched_connections_to)
        yield wire


class _Packed(list[bytes]):
    answers = 1
    """How many it has."""

    subscribes = False


class Wire:
    def __init__(self) -> None:
        self._connections: set[_Watched] = set()
        self._was_used = False
        """A command was answered since all that was published is known to be received."""

        self._has_scripts = False
        self._is_cut = False
        """With the next answer, whoever's it is."""

    def failing(self, store: SessionStore, plan: Plan) -> SessionStore:
        """``store``, of whose commands one fails as planned."""
        assert isinstance(store, RedisStore)
        opened = store.open

        async def opening(policy: SessionPolicy) -> None:
            await opened(policy)
            if not self._has_scripts:
                # The first play of all would make other calls than the next ones.
                self._has_scripts = True
                for script in SCRIPTS.values():
                    await asked(store, "SCRIPT", "LOAD", script.text)
            self._fail_commands(store, plan)

        store.open = opening
        return cast("SessionStore", store)

    def _fail_commands(self, store: RedisStore, plan: Plan) -> None:
        link = store._link  # pyright: ignore[reportPrivateUsage]
        call = link.call

        async def calling(*command: Value) -> Any:
            if command[0] == "TIME":
                # When it looks at the server's clock is up to a clock that does not jump.
                return await call(*command)
            return await plan.call(name_of(command), lambda: call(*command), cut=self._cut)

        link.call = calling

    def _cut(self) -> None:
        self._is_cut = True

    def check_cut(self) -> None:
        """Break all connections, if this is the answer with which they do.

        Raises:
            ConnectionBroke: It is.
        """
        if self._is_cut:
            self._is_cut = False
            for connection in self._connections:
                connection.abort()
            raise ConnectionBroke("cut")

    def joined(self, connection: "_Watched") -> None:
        self._connections.add(connection)
        self.changed()

    def left(self, connection: "_Watched") -> None:
        """It is closed: nothing comes any more."""
        self._connections.discard(connection)
        self.changed()

    def answered(self) -> None:
        """The server did something, which others may learn of."""
        self._was_used = True
        self.changed()

    def changed(self) -> None:
        """Let time pass, or have it stand still."""
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualTimeLoop):
            raise TypeError("only where time jumps")
        if self._was_used and not self._is_busy():
            self._was_used = False
            for connection in self._connections:
                connection.sound()
        if self._is_busy():
            loop.outside_work.add(self)
        else:
            loop.outside_work.discard(self)

    def _is_busy(self) -> bool:
        return any(connection.unanswered for connection in self._connections)


class _Watched:
    """A `Connection` that counts what it waits for."""

    def __init__(self, connection: Connection, wire: Wire) -> None:
        self._connection = connection
        self._wire = wire
        self._subscribes = False
        self._sounded = 0
        """Answers to come that nobody else asked for."""

        self.unanswered = 0
        """The answers that are to come; to be connected is one."""

    def __getattr__(self, name: str) -> Any:
        # Where its server is, for messages.
        return getattr(self._connection, name)

    @property
    def is_connected(self) -> bool:
        return self._connection.is_connected

    async def connect(self) -> None:
        self.unanswered += 1
        self._wire.joined(self)
        await self._connection.connect()
        self.unanswered -= 1
        self._wire.changed()

    async def disconnect(self, nowait: bool = False) -> None:
        self.unanswered = 0
        self._wire.left(self)
        await self._connection.disconnect(nowait=nowait)

    def pack_command(self, *args: Value) -> _Packed:
        packed = _Packed(self._connection.pack_command(*args))
        if args[0] in _SUBSCRIPTIONS:
            packed.answers, packed.subscribes = len(args) - 1, True
        return packed

    async def send_packed_command(self, command: list[bytes], check_health: bool = True) -> None:
        assert isinstance(command, _Packed)
        self._subscribes |= command.subscribes
        self.unanswered += command.answers
        self._wire.changed()
        await self._connection.send_packed_command(command, check_health)

    async def read_response(self, disable_decoding: bool = False) -> Any:
        while True:
            try:
                answer = await self._connection.read_response(disable_decoding=disable_decoding)
            except ResponseError:
                self._answered()
                raise
            if not (self._subscribes and answer[0] == b"message"):
                self._answered()
            if not (self._sounded and answer in (b"PONG", [b"pong", b""])):
                return answer
            self._sounded -= 1

    def _answered(self) -> None:
        self._wire.check_cut()
        self.unanswered -= 1
        if self._subscribes:
            self._wire.changed()
        else:
            self._wire.answered()

    def abort(self) -> None:
        """It breaks; what was on its way to the process is lost."""
        writer = self._writer
        if writer is not None:
            writer.transport.abort()

    def sound(self) -> None:
        """Ask for an answer, before which comes what was published until now."""
        writer = self._writer
        if self._subscribes and writer is not None and not writer.is_closing():
            self.unanswered += 1
            self._sounded += 1
            writer.writelines(self._connection.pack_command("PING"))

    @property
    def _writer(self) -> asyncio.StreamWriter | None:
        return cast(Any, self._connection)._writer
