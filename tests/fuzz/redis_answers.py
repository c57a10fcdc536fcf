"""Redis: its answers on their way through a proxy, and its keys, damaged.

Whatever Redis answers, each request of a client gets an answer: a result, a documented error, or
503. When Redis answers well again, clients are served again.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio import Redis

from mcp_sessions import SessionSecurity
from tests.fuzz.echo import CODES, STATUSES, echo_server
from tests.fuzz.fuzzer import WITHIN, Fuzzer
from tests.fuzz.hostile import Hostile, shown
from tests.fuzz.served import Good, Served, served
from tests.support.modern import ModernClient
from tests.support.raw import Json, RawClient, Reply, at_most
from tests.support.redis_server import RedisServer, redis_server

ERRORS = (
    b"WRONGTYPE Operation against a key holding the wrong kind of value",
    b"MOVED 1 127.0.0.1:1",
    b"ASK 1 127.0.0.1:1",
    b"TRYAGAIN x",
    b"CLUSTERDOWN x",
    b"LOADING x",
    b"BUSY x",
    b"OOM x",
    b"READONLY x",
    b"NOSCRIPT x",
    b"NOAUTH x",
    b"NOPERM x",
    b"MASTERDOWN x",
    b"MISCONF x",
    b"EXECABORT x",
    b"UNKILLABLE x",
    b"ERR x",
    b"\xff\xfe",
    b"",
)
ODD = (
    b"-MOVED x y\r\n",
    b"-MOVED\r\n",
    b"-ASK\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*1\r\n*-1\r\n",
    b"*3\r\n$-1\r\n:-1\r\n*0\r\n",
    b":0\r\n",
    b":-1\r\n",
    b":1\r\n",
    b":" + b"9" * 30 + b"\r\n",
    b":" + b"9" * 5_000 + b"\r\n",
    b":x\r\n",
    b":\r\n",
    b"+OK\r\n",
    b"+\xff\r\n",
    b"$0\r\n\r\n",
    b"$5\r\nhello\r\n",
    b"$2\r\n\xff\xfe\r\n",
    b"$2\r\n{}\r\n",
    b"$4\r\nnull\r\n",
    b"$3\r\nNaN\r\n",
    b"$5\r\nhello world\r\n",
    b"$99999999999\r\n",
    b"$-5\r\n",
    b"$\r\n",
    b"*-5\r\n",
    b"*100000\r\n",
    b"*1\r\n" * 300 + b":1\r\n",
    b"*1\r\n" * 5_000 + b":1\r\n",
    b"?\r\n",
    b"\r\n",
    b"%1\r\n+a\r\n:1\r\n",
    b"_\r\n",
    b"#t\r\n",
    b",nan\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
)
"""Answers in the place of others. Some are no answers."""


class Proxy:
    """Between the store and Redis. Without a plan it changes nothing.

    Args:
        port: Of Redis.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._plan: dict[int, Hostile] = {}
        self._answers = 0
        self._tasks = set[asyncio.Task[Any]]()
        self._writers = set[asyncio.StreamWriter]()
        self.changed: list[bytes] = []
        """The answers that were sent instead, since the plan was made."""

    def plan(self, hostile: Hostile, upto: int) -> None:
        count = hostile.random.randint(1, 3)
        numbers = [hostile.random.randrange(upto) for _ in range(count)]
        self._plan, self._answers, self.changed = dict.fromkeys(numbers, hostile), 0, []

    def mend(self) -> None:
        """Change nothing any more; each connection ends, with whatever is wrong on it."""
        self._plan = {}
        for writer in self._writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there, back = await asyncio.open_connection("127.0.0.1", self._port, limit=2**24)
        ends = {writer, back}
        self._writers |= ends
        asking = asyncio.create_task(_copied(reader, back))
        try:
            while True:
                for piece in self._changed(await _answer(there)):
                    writer.write(piece)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # Either end left, or this is the end.
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            for each in ends:
                each.transport.abort()
            self._writers -= ends
            self._tasks.discard(task)

    def _changed(self, answer: bytes) -> list[bytes]:
        hostile = self._plan.pop(self._answers, None)
        self._answers += 1
        if hostile is None:
            return [answer]
        pieces = _instead(hostile, answer)
        self.changed.append(b"".join(pieces))
        return pieces

    async def aclose(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _instead(hostile: Hostile, answer: bytes) -> list[bytes]:
    case = hostile.random.randrange(12)
    match case:
        case 0 | 1 | 2:
            return [b"-" + hostile.one_of(*ERRORS) + b"\r\n"]
        case 3 | 4 | 5:
            return [hostile.one_of(*ODD)]
        case 6 | 7:
            # One value in it is another.
            at = [n for n, byte in enumerate(answer) if byte in b"$:*+" and answer[n - 1] in b"\n"]
            here = hostile.random.choice(at or [0])
            end = answer.find(b"\r\n", here) + 2
            if answer[here : here + 1] == b"$" and answer[here : here + 2] != b"$-":
                end += int(answer[here + 1 : end - 2]) + 2
            return [answer[:here] + hostile.one_of(*ODD) + answer[end:]]
        case 8:
            # The lengths are right, and what is in it is not.
            return [_refilled(hostile, answer)]
        case 9:
            return [answer, answer]
        case 10:
            return hostile.pieces(answer)[:300]
        case _:
            return [hostile.damaged(answer)]


def _refilled(hostile: Hostile, answer: bytes) -> bytes:
    head, _, rest = answer.partition(b"\r\n")
    if not head.startswith(b"$") or not rest:
        return b"$3\r\n\xff\x00x\r\n"
    spoilt = hostile.damaged(rest[:-2])
    return b"$%d\r\n%s\r\n" % (len(spoilt), spoilt)


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader) -> bytes:
    line = await reader.readuntil(b"\r\n")
    kind, size = line[:1], line[1:-2]
    if kind == b"$" and size != b"-1":
        return line + await reader.readexactly(int(size) + 2)
    if kind == b"*":
        return line + b"".join([await _answer(reader) for _ in range(max(int(size), 0))])
    return line


class RedisDoor:
    """A served layer over a Redis.

    Args:
        target: It.
        proxy: Between them.
        direct: To Redis, past the proxy.
    """

    def __init__(self, target: Served, proxy: Proxy, direct: Any) -> None:
        self._target = target
        self._proxy = proxy
        self._direct = direct

    async def expect_served(self) -> None:
        """See `Door`: Redis is well again, and that is noticed."""
        right: Json = {"text": "good"}
        loop = asyncio.get_running_loop()
        until = loop.time() + WITHIN
        while True:
            good = Good(
                self._target.carrier, "state", right, lambda r: r["structuredContent"] == right
            )
            try:
                return await good.expect_served()
            except AssertionError:
                if loop.time() > until:
                    raise
                # After a failure the store is left alone for half a second.
                await asyncio.sleep(0.1)

    async def play(self, hostile: Hostile) -> None:
        if hostile.chance(0.25):
            await self._with_a_spoilt_key(hostile)
            return
        self._proxy.plan(hostile, upto=hostile.random.choice((3, 12, 40)))
        try:
            await self._converse()
        finally:
            self._proxy.mend()

    async def _with_a_spoilt_key(self, hostile: Hostile) -> None:
        client, session = await self._begun()
        keys: list[bytes] = sorted(await self._direct.keys("*"))
        key = hostile.random.choice(keys)
        kept, left = await self._direct.dump(key), await self._direct.pttl(key)
        match hostile.random.randrange(6):
            case 0:
                await self._direct.delete(key)
            case 1:
                await self._direct.set(key, hostile.noise()[:2_000])
            case 2:
                await self._direct.delete(key)
                await self._direct.rpush(key, b"1", b"\xff")
            case 3:
                await self._direct.delete(key)
                await self._direct.hset(key, mapping={b"a": b"\xff", b"seq": b"x"})
            case 4:
                await self._direct.delete(key)
                await self._direct.zadd(key, {b"a": float("inf"), b"\xff": -1})
            case _:
                await self._spoil_inside(hostile, key)
        self._proxy.changed = [b"the key " + key]
        try:
            await self._go_on(client, session)
        finally:
            if kept is not None:
                await self._direct.restore(key, max(left, 0), kept, replace=True)

    async def _spoil_inside(self, hostile: Hostile, key: bytes) -> None:
        match await self._direct.type(key):
            case b"hash":
                for name in list(await self._direct.hkeys(key)):
                    if hostile.chance(0.5):
                        await self._direct.hset(key, name, hostile.odd()[:2_000])
            case b"zset":
                await self._direct.zadd(key, {hostile.odd()[:2_000]: float("-inf")})
            case b"string":
                value = await self._direct.get(key) or b""
                await self._direct.set(key, hostile.damaged(value)[:100_000])
            case _:
                await self._direct.delete(key)

    async def _begun(self) -> tuple[RawClient, str]:
        client = RawClient(self._target.carrier)
        await at_most(WITHIN, client.initialize())
        started = await at_most(WITHIN, client.start())
        return client, started["sessionId"]

    async def _converse(self) -> None:
        client = RawClient(self._target.carrier)
        params: Json = {
            "protocolVersion": client.version,
            "capabilities": {},
            "clientInfo": {"name": "raw", "version": "1"},
        }
        reply = await self._answered(client.send("initialize", params).reply)
        client.session_id = reply.header("mcp-session-id")
        said = await self._answered(client.send("session/start", {}).reply)
        found: Json = said.messages[0] if said.messages else {}
        started: Json = found.get("result") or {}
        await self._go_on(client, started.get("sessionId", "none"))

    async def _go_on(self, client: RawClient, session: str) -> None:
        modern = ModernClient(self._target.carrier)
        asked = [
            client.call("emit", meta={"progressToken": 1}).reply,
            client.call("state").reply,
            client.send("session/resume", {"sessionId": session}).reply,
            client.send("resources/subscribe", {"uri": "test://a"}).reply,
            modern.call("state", session=session, key="k").reply,
            modern.send("sessions/create").reply,
            modern.send("sessions/delete", session=session).reply,
        ]
        for reply in asked:
            await self._answered(reply)
        await self._answered(client.delete())

    async def _answered(self, reply: Reply) -> Reply:
        """A reply that has ended, and a documented one."""
        changed = ", ".join(map(shown, self._proxy.changed))
        try:
            await reply.until(lambda: reply.ended, within=WITHIN)
        except AssertionError:
            raise AssertionError(f"unanswered, after {changed}: {reply}") from None
        notified = f"after {changed}: {reply}"
        assert reply.status in STATUSES | {503}, notified
        if reply.header("content-type") == "application/json" or reply.is_sse:
            for message in reply.messages:
                code = message.get("error", {}).get("code")
                assert code is None or code in CODES | UNAVAILABLE, notified
        return reply


UNAVAILABLE = {-32603}
"""The store is away: an internal error, in whose data it is said."""


@asynccontextmanager
async def _open() -> AsyncGenerator[RedisDoor]:
    with redis_server() as server:
        async with _through(server) as door:
            yield door


@asynccontextmanager
async def _through(server: RedisServer) -> AsyncGenerator[RedisDoor]:
    proxy = Proxy(server.port)
    direct: Any = Redis(port=server.port)
    listening = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    try:
        async with served(
            echo_server(),
            store=f"redis://127.0.0.1:{port}?timeout=1",
            security=SessionSecurity(["k" * 32]),
        ) as target:
            yield RedisDoor(target, proxy, direct)
    finally:
        await direct.aclose()
        listening.close()
        await proxy.aclose()


REDIS = Fuzzer("redis", _open)
