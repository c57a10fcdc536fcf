"""A request that another replica serves: once, whatever message is lost, and for as long as its
sender waits.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.errors import OutcomeUnknown, StoreUnavailable
from mcp_sessions.principal import ANONYMOUS
from mcp_sessions.security import mint_process
from mcp_sessions.server.cluster import relay
from mcp_sessions.server.cluster.codec import VERSION
from mcp_sessions.server.cluster.relay import Asker, RequestRelay, Unreachable, Unserved
from mcp_sessions.server.cluster.replica_messages import (
    Alive,
    Ask,
    ClientRequest,
    Gone,
    QuestionProgress,
    Result,
    Update,
)

QUESTION = ClientRequest(method="roots/list", params=None)
Message = Ask | Update | Result | Alive | Gone


class Side:
    """One of two processes; a `ClusterBus`."""

    def __init__(self, version: int = VERSION) -> None:
        self.process = mint_process(version)
        self.relay = RequestRelay(self)  # pyright: ignore[reportArgumentType]
        self.sent: list[Message] = []
        self.loses: Callable[[Message], bool] = lambda _: False
        self.is_dead = False
        self.runs = 0
        self.received: list[bool] = []
        self.may_end = asyncio.Event()
        self.tasks: set[asyncio.Task[None]] = set()
        self.other = self
        self.serve: relay.Serve = self.runs_it

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def is_alive(self, _: str) -> bool:
        return not self.other.is_dead

    async def send(self, message: Message, *, to: str) -> bool:
        self.sent.append(message)
        assert to == self.other.process
        if self.other.is_dead:
            return False
        if not self.loses(message):
            work = self.other.handle(message)
            if work is not None:
                self.other.spawn(work)
        return True

    try_send = send

    def handle(self, message: Message) -> Coroutine[Any, Any, None] | None:
        sender = self.other.process
        match message:
            case Ask():
                return self.relay.asked(sender, message, self.serve)
            case Update():
                return self.relay.updated(sender, message)
            case Result():
                return self.relay.answered(sender, message)
            case Alive():
                return self.relay.asked_for(sender, message)
            case Gone():
                return self.relay.gone(sender, message)

    async def runs_it(self, asker: Asker, _: object) -> relay.RelayedOutcome:
        self.runs += 1
        asker.watch(self.received.append)
        await self.may_end.wait()
        return {"runs": self.runs}, None


async def taken(_: Mapping[str, Any]) -> None:
    """Take a message."""


@asynccontextmanager
async def sides(version: int = VERSION) -> AsyncGenerator[tuple[Side, Side]]:
    here, there = Side(), Side(version)
    here.other, there.other = there, here
    there.may_end.set()
    yield here, there
    for each in (here, there):
        for task in list(each.tasks):
            task.cancel()
        await asyncio.gather(*each.tasks, return_exceptions=True)


def first_of(kind: type[Message]) -> Callable[[Message], bool]:
    """The first message of a kind is lost."""
    seen: list[Message] = []

    def is_lost(message: Message) -> bool:
        seen.extend([message] if isinstance(message, kind) else [])
        return seen == [message]

    return is_lost


@pytest.mark.parametrize("is_repeatable", [True, False])
async def test_a_request_that_is_lost_is_sent_again_only_if_it_may_run_twice(
    is_repeatable: bool,
) -> None:
    async with sides() as (here, there):
        here.loses = first_of(Ask)
        asking = here.relay.ask(there.process, QUESTION, taken, is_repeatable=is_repeatable)
        if is_repeatable:
            assert (await asking).result == {"runs": 1}
        else:
            with pytest.raises(OutcomeUnknown):
                await asking
        assert there.runs == is_repeatable


async def test_a_result_that_is_lost_is_sent_again_and_the_request_runs_once() -> None:
    async with sides() as (here, there):
        there.loses = first_of(Result)
        answer = await here.relay.ask(there.process, QUESTION, taken)
        assert (answer.result, there.runs) == ({"runs": 1}, 1)


async def test_a_request_that_comes_twice_runs_once() -> None:
    async with sides() as (here, there):
        there.may_end.clear()
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, taken))
        await asyncio.sleep(1)
        await here.send(here.sent[0], to=there.process)
        there.may_end.set()
        assert (await asking).result == {"runs": 1}
        await here.send(here.sent[0], to=there.process)
        await asyncio.sleep(1)
        assert there.runs == 1
        assert there.sent[-1] == there.sent[-2], "who asks again gets the same result"


@pytest.mark.parametrize("version", [VERSION - 1, VERSION + 1])
async def test_a_process_of_another_version_is_asked_nothing(version: int) -> None:
    async with sides(version) as (here, there):
        with pytest.raises(Unreachable):
            await here.relay.ask(there.process, QUESTION, taken)
        assert not [each for each in here.sent if isinstance(each, Ask)]


async def test_a_request_for_a_dead_process_did_not_run_and_of_one_that_dies_nobody_knows() -> None:
    async with sides() as (here, there):
        there.may_end.clear()
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, taken))
        await asyncio.sleep(1)
        there.is_dead = True
        with pytest.raises(OutcomeUnknown):
            await asking
        with pytest.raises(Unreachable):
            await here.relay.ask(there.process, QUESTION, taken)


async def test_a_process_that_says_so_did_not_run_the_request() -> None:
    async with sides() as (here, there):

        async def not_here(*_: object) -> relay.RelayedOutcome:
            return None, None

        there.serve = not_here
        with pytest.raises(Unserved) as unserved:
            await here.relay.ask(there.process, QUESTION, taken)
        assert not isinstance(unserved.value, Unreachable)


@pytest.mark.parametrize("how", ["cancelled", "cancelled, and not heard", "dead"])
async def test_a_request_is_cancelled_when_its_sender_does_not_wait(how: str) -> None:
    """Its result goes nowhere."""
    async with sides() as (here, there):
        there.may_end.clear()
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, taken))
        await asyncio.sleep(1)
        assert len(there.relay.served(ClientRequest)) == 1
        if how == "dead":
            here.is_dead = True
            await there.relay.round()
        else:
            here.loses = first_of(Gone) if how != "cancelled" else here.loses
            asking.cancel()
            await asyncio.sleep(5 * relay.ALIVE_EVERY)
            await there.relay.round()
        await asyncio.sleep(1)
        assert not there.relay.served(ClientRequest)
        assert not [each for each in there.sent if isinstance(each, Result)]
        asking.cancel()
        await asyncio.wait({asking})


async def test_a_request_whose_sender_waits_in_silence_continues() -> None:
    async with sides() as (here, there):
        there.may_end.clear()
        here.loses = lambda message: isinstance(message, Alive)
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, taken))
        await asyncio.sleep(5 * relay.ALIVE_EVERY)
        await there.relay.round()
        await asyncio.sleep(1)
        assert [each for each in there.sent if isinstance(each, Alive)]
        there.may_end.set()
        assert (await asking).result == {"runs": 1}


async def test_progress_that_takes_long_is_not_cancelled() -> None:
    """Its sender does not wait for it, and so knows nothing of it."""
    async with sides() as (here, there):
        there.may_end.clear()
        progress = QuestionProgress(params=None, principal=ANONYMOUS)
        await here.relay.notify(there.process, progress)
        await asyncio.sleep(5 * relay.ALIVE_EVERY)
        await there.relay.round()
        await asyncio.sleep(1)
        assert len(there.relay.served(QuestionProgress)) == 1
        there.may_end.set()
        await asyncio.sleep(1)
        assert there.runs == 1 and not there.sent


@pytest.mark.parametrize("is_there", [False, True])
async def test_an_update_that_the_store_did_not_take_waits_and_comes_once(is_there: bool) -> None:
    """The store fails before or after it has the first of them; the second one waits."""
    async with sides() as (here, there):
        heard: list[object] = []

        async def hears(message: Mapping[str, Any]) -> None:
            heard.append(message["n"])

        async def reports(asker: Asker, _: object) -> relay.RelayedOutcome:
            await asyncio.gather(*(asker.update({"n": n}) for n in range(3)))
            return {}, None

        sends, failures = there.send, 3

        async def fails(message: Message, *, to: str) -> bool:
            nonlocal failures
            if not isinstance(message, Update) or not failures:
                return await sends(message, to=to)
            failures -= 1
            if is_there:
                await sends(message, to=to)
            raise StoreUnavailable("away")

        async def logs(message: Message, *, to: str) -> None:
            with suppress(StoreUnavailable):
                await fails(message, to=to)

        there.serve, there.send = reports, fails
        there.try_send = logs  # pyright: ignore[reportAttributeAccessIssue]
        result = await here.relay.ask(there.process, QUESTION, hears)
        assert result.result == {} and heard == [0, 1, 2]


@given(
    lost=st.lists(st.booleans(), max_size=60),
    waits=st.lists(st.sampled_from([0.0, 0.3, 1.5, 3.0]), min_size=1, max_size=12),
)
async def test_every_update_comes_once_and_in_order_whatever_is_lost(
    lost: list[bool], waits: list[float]
) -> None:
    """Each message of the first ones may be lost, in both directions; the request itself is not."""
    heard: list[int] = []
    losses = iter(lost)

    async def hears(message: Mapping[str, Any]) -> None:
        heard.append(int(message["n"]))

    async def reports(asker: Asker, _: object) -> relay.RelayedOutcome:
        for n, wait in enumerate(waits):
            await asker.update({"n": n})
            await asyncio.sleep(wait)
        return {}, None

    def is_lost(message: Message) -> bool:
        return not isinstance(message, Ask | Gone) and next(losses, False)

    async with sides() as (here, there):
        here.loses = there.loses = is_lost
        there.serve = reports
        result = await here.relay.ask(there.process, QUESTION, hears)
        # What is missing is asked for a few times only.
        if sum(lost) <= 3:
            assert heard == [*range(len(waits))]
        assert heard == sorted(set(heard))
        assert result.result == {}


async def test_what_an_earlier_release_lost_is_left_out_at_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It keeps no update."""
    async with sides() as (here, there):
        heard: list[object] = []

        async def hears(message: Mapping[str, Any]) -> None:
            heard.append(message["n"])

        async def reports(asker: Asker, _: object) -> relay.RelayedOutcome:
            for n in range(4):
                await asker.update({"n": n})
                asker.unread.after(None)
            await there.may_end.wait()
            return {}, None

        seen = 0

        def is_lost(message: Message) -> bool:
            nonlocal seen
            seen += isinstance(message, Update)
            return isinstance(message, Update) and seen in (2, 4)

        there.serve, there.loses = reports, is_lost
        there.may_end.clear()
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, hears))
        await asyncio.sleep(1)
        assert heard == [0]
        await asyncio.sleep(8 * relay.ALIVE_EVERY)
        assert heard == [0, 2]
        there.may_end.set()
        assert (await asking).result == {}
        assert "messages of a call at another replica were lost" in caplog.text


async def test_updates_that_are_not_confirmed_are_bounded_in_bytes() -> None:
    """A replica that hears nothing holds up the call that reports, and gets everything later."""
    async with sides() as (here, there):
        heard: list[object] = []
        is_deaf = True

        async def hears(message: Mapping[str, Any]) -> None:
            heard.append(message["n"])

        async def reports(asker: Asker, _: object) -> relay.RelayedOutcome:
            for n in range(40):
                await asker.update({"n": n, "text": "x" * 100_000})
            return {}, None

        there.serve = reports
        there.loses = lambda message: is_deaf and not isinstance(message, Gone)
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, hears))
        await asyncio.sleep(1)
        first = {each.number for each in there.sent if isinstance(each, Update)}
        assert first == {*range(1, 7)}
        is_deaf = False
        assert (await asking).result == {}
        assert heard == [*range(40)]


async def test_who_reports_may_be_cancelled_and_the_later_updates_come() -> None:
    """The first one was being sent. It may come, and leaves no hole."""
    async with sides() as (here, there):
        heard: list[object] = []
        sends = there.send

        async def hears(message: Mapping[str, Any]) -> None:
            heard.append(message["n"])

        async def hangs(message: Message, *, to: str) -> bool:
            if isinstance(message, Update) and message.number == 1:
                await asyncio.sleep(1_000)
            return await sends(message, to=to)

        async def reports(asker: Asker, _: object) -> relay.RelayedOutcome:
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await asker.update({"n": 1})
            there.send = sends
            await asker.update({"n": 2})
            return {}, None

        there.serve, there.send = reports, hangs
        async with asyncio.timeout(3):
            result = await here.relay.ask(there.process, QUESTION, hears)
        assert result.result == {} and heard == [1, 2]


async def test_who_reports_to_a_side_that_has_left_waits_for_nothing() -> None:
    """It left while an update was sent, and nobody confirms any."""
    async with sides() as (here, there):
        asker = Asker(there.relay, here.process, "n")
        sends = there.send

        async def leaves(message: Message, *, to: str) -> bool:
            asker.leaves()
            return await sends(message, to=to)

        there.send = leaves
        async with asyncio.timeout(1):
            for _ in range(20):
                await asker.update({"text": "x" * 100_000})


async def test_whether_the_client_listens_is_said_at_once_and_again() -> None:
    """The first message may be lost."""
    async with sides() as (here, there):
        there.may_end.clear()
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, taken, name="n"))
        await asyncio.sleep(1)
        here.relay.listens("n", is_open=False)
        await asyncio.sleep(0.5)
        assert there.received == [False]
        await asyncio.sleep(relay.ALIVE_EVERY)
        assert there.received[-2:] == [False, False]
        there.may_end.set()
        await asking


async def test_what_is_asked_within_a_request_waits_its_turn_and_ends_with_the_request() -> None:
    """A client gets the messages before a question first."""
    async with sides() as (here, there):
        takes, order = asyncio.Event(), list[object]()

        async def slowly(message: Mapping[str, Any]) -> None:
            await takes.wait()
            order.append(message["n"])

        async def asks(asker: Asker, _: object) -> relay.RelayedOutcome:
            await asker.update({"n": 1})
            return (await asker.ask(QUESTION, taken)).result, None

        async def asked(_: Asker, __: object) -> relay.RelayedOutcome:
            order.append("asked")
            return {"yes": True}, None

        there.serve = asks
        asking = asyncio.create_task(here.relay.ask(there.process, QUESTION, slowly, serve=asked))
        await asyncio.sleep(1)
        assert order == []
        takes.set()
        assert (await asking).result == {"yes": True}
        assert order == [1, "asked"]

        request = Ask(ask="late", within="over", request=QUESTION)
        late = here.relay.asked(there.process, request, here.serve)
        assert late is not None
        await late
        answer = here.sent[-1]
        assert isinstance(answer, Result) and answer.error is not None and here.runs == 0
