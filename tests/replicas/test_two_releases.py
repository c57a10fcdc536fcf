"""Two releases serve the same sessions while one replaces the other: what one tells, the other
reads as far as it knows it, and the rounds bring the rest.
"""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mcp_sessions import assembly
from mcp_sessions.server.cluster import remote_children, shared_bus
from mcp_sessions.server.cluster.codec import VERSION
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.exchange import ExchangeListener
from tests.support.children import child
from tests.support.modern import ModernClient
from tests.support.raw import EXTENSION, RawClient, at_most, in_session, keyed, text_of, uris
from tests.support.replicas import Cluster, cluster
from tests.support.world import Toolbox

SOON = 8.0
"""Seconds of some rounds, on a machine that is busy."""

Translate = Callable[[bytes], bytes]


def without_younger_members(message: bytes) -> bytes:
    """As a release wrote it in which the kinds had their first members only."""
    members: dict[str, Any] = json.loads(message)
    added = {"change": "id", "displaced": "instance"}
    members.pop(added.get(members["kind"], ""), None)
    return json.dumps(members, separators=(",", ":")).encode()


def of_the_next_version(message: bytes) -> bytes:
    """A version of its own, so that neither release reads what the other writes; what is of
    its own version is of ours for who is told here.
    """
    swapped = {b'{"v":1,': b'{"v":2,', b'{"v":2,': b'{"v":1,'}
    return swapped[message[:7]] + message[7:]


def as_it_is(message: bytes) -> bytes:
    return message


RELEASES = pytest.mark.parametrize(
    ("writes", "reads"),
    [
        pytest.param(without_younger_members, as_it_is, id="before"),
        pytest.param(of_the_next_version, of_the_next_version, id="next"),
    ],
)
OTHERS = pytest.mark.parametrize("other", [0, 1])
"""Which of the two replicas is of the other release."""


class _Received:
    """An `ExchangeListener` that receives the messages of another release."""

    def __init__(self, listener: ExchangeListener, reads: Translate) -> None:
        self._listener = listener
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)

    def on_message(self, message: bytes) -> None:
        self._listener.on_message(self._reads(message))


class _Exchange:
    """An `Exchange` by which a replica of another release speaks."""

    def __init__(self, exchange: Any, writes: Translate, reads: Translate) -> None:
        self._exchange = exchange
        self._writes = writes
        self._reads = reads

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exchange, name)

    async def join(self, process: str, listener: ExchangeListener) -> None:
        await self._exchange.join(process, _Received(listener, self._reads))

    async def send(self, message: bytes, *, to: str | None = None) -> bool:
        return await self._exchange.send(self._writes(message), to=to)


class _Store:
    def __init__(self, store: SessionStore, writes: Translate, reads: Translate) -> None:
        self._store = store
        self.exchange = _Exchange(store.exchange, writes, reads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@asynccontextmanager
async def two_releases(
    writes: Translate,
    reads: Translate,
    other: int,
    monkeypatch: pytest.MonkeyPatch,
    server: Callable[[], tuple[Toolbox, object]] | None = None,
) -> AsyncGenerator[Cluster]:
    """Two replicas, one of which is of another release; their rounds follow quickly."""
    monkeypatch.setattr(shared_bus, "ROUND", 0.25)

    def released(number: int, store: Any) -> Any:
        is_next = number == other and writes is of_the_next_version
        # Each names its version where it names itself.
        monkeypatch.setattr(assembly, "VERSION", VERSION + is_next)
        return _Store(store, writes, reads) if number == other else store

    async with cluster(2, server=server, store_of=released) as c:
        yield c


async def with_session(c: Cluster) -> tuple[RawClient, str]:
    client = await c[0].connected(capabilities={"extensions": {EXTENSION: {}}})
    return client, (await client.start())["sessionId"]


@OTHERS
@RELEASES
async def test_a_session_continues_from_one_release_to_the_other(
    writes: Translate, reads: Translate, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its GET stream is on one, its requests come to both, events of both are received in order."""
    async with two_releases(writes, reads, other, monkeypatch) as c:
        client, session = await with_session(c)
        stream = await client.get().started()
        for number in range(4):
            await c.at(number % 2, client).text("update", uri=f"a:{number}")
        assert uris(await at_most(SOON, stream.has(4))) == [f"a:{n}" for n in range(4)]

        stream.leave()
        again = await c.at(1, client).get(stream.events[-1].id).started()
        assert await c.at(1, client).text("session_id") == session
        await client.text("update", uri="a:4")
        assert uris(await at_most(SOON, again.has(1))) == ["a:4"]


@OTHERS
@RELEASES
async def test_a_session_that_the_other_release_took_is_released(
    writes: Translate, reads: Translate, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTM9: its listen stream ends, by a message to its replica, or in one of its rounds."""
    async with two_releases(writes, reads, other, monkeypatch) as c:
        client, newer = (ModernClient(w.carrier) for w in c.worlds)
        session = (await client.create())["sessionId"]
        old = await client.listening(session, "a:1")
        new = await newer.listening(session, "a:1")
        assert "error" not in await at_most(SOON, old.answer())
        await client.text("update", {"uri": "a:1"}, session=session)
        assert len(await at_most(SOON, new.has_events(1))) == 1
        assert not old.events


@OTHERS
@RELEASES
async def test_a_key_sent_again_to_the_other_release_gets_the_one_answer(
    writes: Translate, reads: Translate, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KEY3: by a message, or because it asks the store by itself."""
    async with two_releases(writes, reads, other, monkeypatch) as c:
        client, session = await with_session(c)
        first = client.call("wait", gate="g", meta=keyed("k", session))
        await c[0].box.gate("g").started.wait()
        again = c.at(1, client).call("wait", gate="g", meta=keyed("k", session))
        c[0].box.gate("g").go.set()
        for one in (first, again):
            assert text_of(await at_most(SOON, one.result())) == "through g"
        assert len(c[0].box.calls) == 1 and not c[1].box.calls


@OTHERS
@RELEASES
async def test_what_runs_in_a_session_that_the_other_release_ended_fails(
    writes: Translate, reads: Translate, other: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """END6: at once, or in a round."""
    async with two_releases(writes, reads, other, monkeypatch) as c:
        client, session = await with_session(c)
        waits = client.call("wait", gate="g", meta=in_session(session))
        await c[0].box.gate("g").started.wait()
        await c[1].client().end(session)
        error = await at_most(SOON, waits.error())
        assert (error["code"], error["data"]["started"]) == (-32043, True)


@pytest.mark.on_network
async def test_a_process_that_a_replica_of_the_next_version_has_counts_as_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The session gets another one, as if that replica were gone. The log says it once for each
    replica.
    """
    monkeypatch.setattr(remote_children, "LEASE", 0.25)

    def server() -> tuple[Toolbox, object]:
        return Toolbox(), child()

    next_version = of_the_next_version
    async with two_releases(next_version, next_version, 0, monkeypatch, server) as c:
        client, session = await with_session(c)
        meta = in_session(session)
        first = await client.text("pid", meta=meta)
        other = c.at(1, client)
        second = text_of(await at_most(SOON, other.call("pid", meta=meta).result()))
        assert second not in ("", first)
        assert await other.text("pid", meta=meta) == second
        said = [each for each in caplog.messages if "sends messages of version 2" in each]
        assert 1 <= len(said) <= 2
