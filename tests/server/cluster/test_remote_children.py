"""The messages of a child in another process, to a client here that takes nothing: their bounds."""

import asyncio
import gc
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.security import mint_process, mint_request_id
from mcp_sessions.server.cluster import relay, remote_children
from mcp_sessions.server.cluster.child_host import RemoteCall
from mcp_sessions.server.cluster.codec import VERSION
from mcp_sessions.server.cluster.relay import Asker, RequestRelay
from mcp_sessions.server.cluster.remote_children import RemoteChildren
from mcp_sessions.server.cluster.replica_messages import (
    Alive,
    Ask,
    ClientRequest,
    Gone,
    Result,
    Update,
)
from mcp_sessions.server.delivery.questions import PendingQuestions
from mcp_sessions.server.upstream.external.other_replicas import Lease, RemoteRequest, ServedResult
from mcp_sessions.server.upstream.external.server_messages import WAITING
from mcp_sessions.server.upstream.port import (
    AWAY,
    LISTENS,
    TOO_FAR,
    PeerError,
    PeerRequest,
    UpstreamError,
)
from tests.support.children import until
from tests.support.virtual_time import VIRTUAL

THERE = "process-there"
PROGRESS = "notifications/progress"
KEPT_BYTES = relay._KEPT_BYTES  # pyright: ignore[reportPrivateUsage]


class Bus:
    """Notes the messages; nothing comes back by itself."""

    process = "here"

    def __init__(self) -> None:
        self.notified: list[Any] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def try_send(self, message: object, *, to: str | None = None) -> None:
        self.notified.append(message)

    async def send(self, message: object, *, to: str | None = None) -> bool:
        await self.try_send(message, to=to)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def is_remote(self, process: str) -> bool:
        return process != self.process

    async def is_alive(self, process: str) -> bool:
        return True


class Client:
    """Takes what it is sent once it is let."""

    principal = ANONYMOUS
    can_send_request = True
    reach = LISTENS

    def __init__(self) -> None:
        self.takes, self.answers = asyncio.Event(), asyncio.Event()
        self.received: list[Any] = []
        self.asked: list[Any] = []

    async def report(self, params: Mapping[str, Any]) -> None:
        await self.takes.wait()
        self.received.append(params["progress"])

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        self.asked.append((asked.params or {})["n"])
        await self.answers.wait()
        return {"size": "x" * (asked.params or {}).get("size", 0)}


class Link:
    """One request of a client here, for a child in another process."""

    def __init__(self) -> None:
        self.bus, self.client = Bus(), Client()
        nothing: Any = None
        bus: Any = self.bus
        call: Any = self.client
        self.relay = RequestRelay(bus)
        self.other_replicas = RemoteChildren(self.relay, nothing, nothing)
        lease = Lease(SessionId("s"), mint_request_id(THERE), False, 0.0, None)
        work = self.other_replicas.ask(lease, call, RemoteRequest({}, "tools/call", {}, None, None))
        self.task: asyncio.Task[ServedResult] = asyncio.create_task(work)

    async def asked(self) -> str:
        """Its name, once it was asked."""
        await until(lambda: self.bus.notified, "it is asked")
        message: Ask = self.bus.notified[0]
        return message.ask

    def says(self, ask: str, **said: Any) -> None:
        update = Update(ask=ask, message={"method": PROGRESS, "params": said})
        work = self.relay.updated(THERE, update)
        if work is not None:
            self.bus.spawn(work)

    async def asks(self, ask: str, question: str, **said: Any) -> None:
        request = ClientRequest(method="roots/list", params=said)
        work = self.relay.asked(THERE, Ask(ask=question, within=ask, request=request), None)
        if work is not None:
            await work

    def withdraws(self, question: str) -> None:
        self.relay.gone(THERE, Gone(ask=question))

    async def ended(self, ask: str) -> None:
        """It is answered, and so is its client."""
        result = {"result": {"ok": 1}, "handshake": {}}
        self.relay.answered(THERE, Result(ask=ask, result=result, error=None))
        async with asyncio.timeout(10):
            assert (await self.task)[0] == {"ok": 1}


async def test_what_a_client_takes_too_slowly_is_bounded_in_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = Link()
    ask = await link.asked()
    for n in range(100):
        link.says(ask, progress=n, message="x" * 100_000)
        await asyncio.sleep(0)
    link.client.takes.set()
    await link.ended(ask)
    received = link.client.received
    assert received == list(range(len(received)))
    assert 100_000 * (len(received) - 1) < WAITING < 100_000 * (len(received) + 1)
    assert caplog.text.count("some are dropped") == 1


@pytest.mark.parametrize("answers", [True, False])
async def test_the_last_words_of_a_process_that_is_gone_are_received_to_their_end(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them may come after it was found to be gone, and what never comes is unknown."""
    monkeypatch.setattr(relay, "ALIVE_EVERY", 0.02)
    monkeypatch.setattr(relay, "_LAST_WORDS", 5.0 if answers else 0.2)
    link = Link()
    link.client.takes.set()
    ask = await link.asked()
    looked = asyncio.Event()

    async def look(_: str) -> bool:
        looked.set()
        return False

    monkeypatch.setattr(link.bus, "is_alive", look)
    await looked.wait()
    link.says(ask, progress=1)
    await until(lambda: link.client.received, "it is heard")
    if answers:
        await link.ended(ask)
    else:
        with pytest.raises(UpstreamError) as failed:
            await link.task
        assert failed.value.error["code"] == -31012


async def test_a_question_that_is_said_again_and_one_that_is_withdrawn_wait_once_and_not() -> None:
    """A child asks, and gives up, as often as it likes."""
    link = Link()
    ask = await link.asked()
    link.says(ask, progress=0)
    await asyncio.sleep(0)
    for n in range(100):
        await link.asks(ask, "asked again", n="again")
        await link.asks(ask, f"given up {n}", n=n)
        await asyncio.sleep(0)
        link.withdraws(f"given up {n}")
    await asyncio.sleep(0)
    (pending,) = link.relay._pending.values()  # pyright: ignore[reportPrivateUsage]
    assert len(pending.waiting) <= 2
    link.client.takes.set()
    await until(lambda: link.client.asked, "it is asked")
    await link.asks(ask, "asked again", n="again")
    link.withdraws("asked again")
    await until(lambda: not link.bus.tasks, "nobody is asked any more")
    assert link.client.asked == ["again"]
    await link.ended(ask)
    assert not any(isinstance(each, Result) for each in link.bus.notified)


async def test_a_client_that_is_away_is_asked_only_if_no_other_is_nearer() -> None:
    """The question may be about a call of another process, whose client waits."""
    link = Link()
    ask = await link.asked()
    link.client.reach = AWAY
    link.client.answers.set()
    for question, least in (("q1", LISTENS), ("q2", AWAY)):
        request = ClientRequest(method="roots/list", params={"n": question}, least=least)
        work = link.relay.asked(THERE, Ask(ask=question, within=ask, request=request), None)
        assert work is None
    await until(lambda: len(link.bus.notified) == 3, "both are answered")
    results = {each.ask: each for each in link.bus.notified if isinstance(each, Result)}
    refusal = results["q1"].error
    assert refusal is not None and refusal["data"] == TOO_FAR
    assert results["q2"].error is None and link.client.asked == ["q2"]
    await link.ended(ask)


async def test_answers_of_a_client_are_kept_while_there_is_room_and_sent_again() -> None:
    link = Link()
    ask = await link.asked()
    link.client.answers.set()
    for n in range(30):
        await link.asks(ask, f"q{n}", n=n, size=400_000)
    await until(lambda: len(link.bus.notified) == 31, "all are answered")
    kept = link.relay._kept  # pyright: ignore[reportPrivateUsage]
    assert 400_000 * len(kept) < KEPT_BYTES < 400_000 * (len(kept) + 2)
    (pending,) = link.relay._pending.values()  # pyright: ignore[reportPrivateUsage]
    assert not pending.served
    await link.asks(ask, "q29", n=29)
    await until(lambda: len(link.bus.notified) == 32, "it is told again")
    assert link.client.asked == list(range(30))
    await link.ended(ask)


async def test_answers_and_errors_of_a_child_are_kept_while_there_is_room() -> None:
    bus = Bus()
    any_bus: Any = bus
    served = RequestRelay(any_bus)
    for n in range(50):
        large: Any = {"code": -32000, "message": "no", "data": "x" * 1_000_000}
        kept = Result(ask=f"a{n}", result=None if n % 2 else large, error=large if n % 2 else None)
        served._keep(kept, relay.Unread())  # pyright: ignore[reportPrivateUsage]
    for n in (0, 48, 49):
        work = served.asked_for(THERE, Alive(ask=f"a{n}", is_open=True))
        assert work is not None
        await work
    first, *last = bus.notified
    assert first == Gone(ask="a0"), "nobody knows any more"
    assert [each.ask for each in last if isinstance(each, Result)][-1:] == ["a49"]
    held = served._kept  # pyright: ignore[reportPrivateUsage]
    assert 0 < len(held) <= 8
    before = list(held)
    too_large = Result(ask="b", result={"text": "x" * KEPT_BYTES}, error=None)
    served._keep(too_large, relay.Unread())  # pyright: ignore[reportPrivateUsage]
    assert list(held) == before, "one answer does not push out all others"


async def test_who_asks_and_is_cancelled_when_the_request_has_ended_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A child dies with a question to a client of another process."""
    bus: Any = Bus()
    asking = RequestRelay(bus)
    asker = Asker(asking, THERE, "ask")
    call = RemoteCall(asker, ANONYMOUS, True, PendingQuestions().ask_there)
    waits, cancelled = (
        asyncio.create_task(call.send_request(PeerRequest("roots/list", {}))) for _ in range(2)
    )
    await until(lambda: len(bus.notified) == 2, "both are asked")
    cancelled.cancel()
    asking._end_within(asker)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(PeerError, match="the request that asked is complete"):
        await waits
    await asyncio.wait({cancelled})
    assert cancelled.cancelled()
    # With it its future goes, which says then what was not received.
    del waits, cancelled
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text


class Holders:
    """Who has the child of a session; an `Exchange` and a `SessionStore`. A step takes time."""

    def __init__(self, holder: str) -> None:
        self.holder = holder

    async def claim(self, _: SessionId, name: str, *, instead_of: str | None = None) -> str:
        await asyncio.sleep(0.01)
        if instead_of == self.holder:
            self.holder = name
        holder = self.holder
        await asyncio.sleep(0.01)
        return holder

    async def load(self, *_: object, **__: object) -> None:
        """Nothing is known of the session."""
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("anyio_backend", [VIRTUAL])
@pytest.mark.parametrize("later", [0.0, 0.01, 0.025, 0.03, 0.035, 0.05, 0.1])
async def test_all_calls_wait_until_a_process_of_another_version_asks_its_child_no_more(
    later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both could ask a child something for the same session otherwise."""
    monkeypatch.setattr(remote_children, "LEASE", 1.0)
    holders: Any = Holders(mint_request_id(mint_process(VERSION + 1)))
    bus: Any = Bus()
    bus.process = mint_process(VERSION)
    children = RemoteChildren(RequestRelay(bus), holders, holders)
    loop = asyncio.get_running_loop()
    begun = loop.time()
    async with asyncio.TaskGroup() as together:
        first = together.create_task(children.lease(SessionId("s")))
        await asyncio.sleep(later)
        second = together.create_task(children.lease(SessionId("s")))
        done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        assert done and loop.time() >= begun + 1.0
    assert first.result().holder == second.result().holder == holders.holder
