"""What a child elsewhere says to a client here, while that takes nothing: the bounds of it."""

import asyncio
import gc
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest

from mcp_sessions.ids import SessionId
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.security import mint_request_id
from mcp_sessions.server.cluster import children
from mcp_sessions.server.cluster.child_host import ChildHost, RemoteCall
from mcp_sessions.server.cluster.children import ChildrenElsewhere
from mcp_sessions.server.cluster.messages import (
    AnswerChild,
    AskChild,
    ChildAnswered,
    ChildAwaited,
    ChildSaid,
)
from mcp_sessions.server.upstream.external.elsewhere import Asked, Lease, Served
from mcp_sessions.server.upstream.external.telling import WAITING
from mcp_sessions.server.upstream.port import PeerError, PeerRequest, UpstreamError
from tests.support.children import until

pytestmark = pytest.mark.anyio

THERE = "process-there"
PROGRESS = "notifications/progress"


class Bus:
    """Notes what is told; nothing comes back by itself."""

    process = "here"

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def tell(self, message: object, *, to: str | None = None) -> None:
        self.told.append(message)

    async def send(self, message: object, *, to: str | None = None) -> bool:
        await self.tell(message, to=to)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def is_alive(self, process: str) -> bool:
        return True


class Client:
    """Takes what it is told once it is let."""

    principal = ANONYMOUS
    can_send_request = True

    def __init__(self) -> None:
        self.takes, self.answers = asyncio.Event(), asyncio.Event()
        self.heard: list[Any] = []
        self.asked: list[Any] = []

    async def report(self, params: Mapping[str, Any]) -> None:
        await self.takes.wait()
        self.heard.append(params["progress"])

    async def send_request(self, asked: PeerRequest) -> dict[str, Any]:
        self.asked.append((asked.params or {})["n"])
        await self.answers.wait()
        return {"size": "x" * (asked.params or {}).get("size", 0)}


class Link:
    """One request of a client here, for a child elsewhere."""

    def __init__(self) -> None:
        self.bus, self.client = Bus(), Client()
        nothing: Any = None
        bus: Any = self.bus
        call: Any = self.client
        self.elsewhere = ChildrenElsewhere(bus, nothing, nothing)
        lease = Lease(SessionId("s"), mint_request_id(THERE), False, 0.0, None)
        work = self.elsewhere.ask(lease, call, Asked({}, "tools/call", {}, None, None))
        self.task: asyncio.Task[Served] = asyncio.create_task(work)

    async def asked(self) -> str:
        """Its name, once it was asked."""
        await until(lambda: self.bus.told, "it is asked")
        message: AskChild = self.bus.told[0]
        return message.ask

    def says(self, ask: str, method: str | None, question: str | None = None, **said: Any) -> None:
        message = ChildSaid(ask=ask, question=question, method=method, params=said)
        self.elsewhere.said(THERE, message)

    async def over(self, ask: str) -> None:
        """It is answered, and so is its client."""
        answered = ChildAnswered(ask=ask, result={"ok": 1}, error=None, handshake={})
        self.elsewhere.answered(THERE, answered)
        async with asyncio.timeout(10):
            assert (await self.task)[0] == {"ok": 1}


async def test_what_a_client_takes_too_slowly_is_bounded_in_bytes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link = Link()
    ask = await link.asked()
    for n in range(100):
        link.says(ask, PROGRESS, progress=n, message="x" * 100_000)
        await asyncio.sleep(0)
    link.client.takes.set()
    await link.over(ask)
    heard = link.client.heard
    assert heard == list(range(len(heard)))
    assert 100_000 * (len(heard) - 1) < WAITING < 100_000 * (len(heard) + 1)
    assert caplog.text.count("some are dropped") == 1


@pytest.mark.parametrize("answers", [True, False])
async def test_the_last_words_of_a_process_that_is_gone_are_heard_to_their_end(
    answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of them may come after it was found to be gone, and what never comes is unknown."""
    monkeypatch.setattr(children, "_ASK_EVERY", 0.02)
    monkeypatch.setattr(children, "_LAST_WORDS", 5.0 if answers else 0.2)
    link = Link()
    link.client.takes.set()
    ask = await link.asked()
    looked = asyncio.Event()

    async def look(_: str) -> bool:
        looked.set()
        return False

    monkeypatch.setattr(link.bus, "is_alive", look)
    await looked.wait()
    link.says(ask, PROGRESS, progress=1)
    await until(lambda: link.client.heard, "it is heard")
    if answers:
        await link.over(ask)
    else:
        with pytest.raises(UpstreamError) as failed:
            await link.task
        assert failed.value.error["code"] == -31012


async def test_a_question_that_is_said_again_and_one_that_is_withdrawn_wait_once_and_not() -> None:
    """A child asks, and gives up, as often as it likes."""
    link = Link()
    ask = await link.asked()
    link.says(ask, PROGRESS, progress=0)
    await asyncio.sleep(0)
    for n in range(100):
        link.says(ask, "roots/list", "asked again", n="again")
        link.says(ask, "roots/list", f"given up {n}", n=n)
        link.says(ask, None, f"given up {n}")
    (waiting,) = link.elsewhere._asks.values()  # pyright: ignore[reportPrivateUsage]
    assert len(waiting.said) <= 2
    link.client.takes.set()
    await until(lambda: link.client.asked, "it is asked")
    link.says(ask, "roots/list", "asked again", n="again")
    link.says(ask, None, "asked again")
    await until(lambda: not link.bus.tasks, "nobody is asked any more")
    assert link.client.asked == ["again"]
    await link.over(ask)
    assert not any(isinstance(each, AnswerChild) for each in link.bus.told)


async def test_answers_of_a_client_are_kept_while_there_is_room_and_told_again() -> None:
    link = Link()
    ask = await link.asked()
    link.client.answers.set()
    for n in range(30):
        link.says(ask, "roots/list", f"q{n}", n=n, size=100_000)
    await until(lambda: len(link.bus.told) == 31, "all are answered")
    (waiting,) = link.elsewhere._asks.values()  # pyright: ignore[reportPrivateUsage]
    assert 100_000 * len(waiting.answers) < WAITING < 100_000 * (len(waiting.answers) + 2)
    assert not waiting.questions
    link.says(ask, "roots/list", "q29", n=29)
    await until(lambda: len(link.bus.told) == 32, "it is told again")
    assert link.client.asked == list(range(30))
    await link.over(ask)


async def test_answers_and_errors_of_a_child_are_kept_while_there_is_room() -> None:
    bus = Bus()
    nothing: Any = None
    any_bus: Any = bus
    host = ChildHost(any_bus, nothing, nothing, upstream=nothing, rounds=nothing, way_to=nothing)
    for n in range(50):
        large: Any = {"code": -32000, "message": "no", "data": "x" * 1_000_000}
        kept = ChildAnswered(
            ask=f"a{n}",
            result=None if n % 2 else large,
            error=large if n % 2 else None,
            handshake=None,
        )
        host._keep(kept)  # pyright: ignore[reportPrivateUsage]
    for n in (0, 48, 49):
        work = host.handle(THERE, ChildAwaited(ask=f"a{n}", is_awaited=True))
        assert work is not None
        await work
    first, *last = bus.told
    assert first.error["code"] == -31012, "nobody knows any more"
    assert [each.ask for each in last if each.error is None or "data" in each.error][-1:] == ["a49"]
    held = host._answered  # pyright: ignore[reportPrivateUsage]
    assert 0 < len(held) <= 8


async def test_who_asks_and_is_cancelled_when_the_request_is_over_leaves_nothing_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A child dies with a question to a client elsewhere."""
    bus: Any = Bus()
    call = RemoteCall(bus, THERE, "ask", ANONYMOUS, True)
    waits, cancelled = (
        asyncio.create_task(call.send_request(PeerRequest("roots/list", {}))) for _ in range(2)
    )
    await until(lambda: len(bus.told) == 2, "both are asked")
    cancelled.cancel()
    call.over()
    with pytest.raises(PeerError, match="the request that asked is over"):
        await waits
    await asyncio.wait({cancelled})
    assert cancelled.cancelled()
    # With it its future goes, which says then what was not heard.
    del waits, cancelled
    gc.collect()
    await asyncio.sleep(0)
    assert "never retrieved" not in caplog.text
