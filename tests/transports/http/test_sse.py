"""One server-sent event stream: its bytes, its buffer, its reader; and what feeds it."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.types import Message

from mcp_sessions.core.log import UNBOUNDED, Draft, EventLog, LoggedEvent, Window
from mcp_sessions.errors import Refusal, StoreUnavailable
from mcp_sessions.ids import LogEpoch, Position, SessionId
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.turns import Turns
from mcp_sessions_transports.http.sse import (
    KEEP_ALIVE,
    RETRY,
    SseStream,
    plain_frame,
    priming_event,
    sse_event,
)
from mcp_sessions_transports.outbox import LogFeed
from tests.support.virtual_time import cycles

HEADERS = [(b"x-test", b"1")]
A, B = SessionId("a" * 43), SessionId("b" * 43)


class Peer:
    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.flows = asyncio.Event()
        self.flows.set()
        self.gone = asyncio.Event()
        self.breaks: BaseException | None = None
        self.served: asyncio.Task[bool]

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.flows.wait()
        if self.breaks is not None:
            raise self.breaks
        self.sent.append(message)

    @property
    def chunks(self) -> list[bytes]:
        return [m["body"] for m in self.sent if m["type"] == "http.response.body" and m["body"]]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def is_complete(self) -> bool:
        """Whether the response has its proper end."""
        return bool(self.sent) and self.sent[-1].get("more_body") is False


def stream_of(*, limit: int = 100, slow_timeout: float = 10) -> SseStream:
    return SseStream(SessionPolicy(send_buffer=limit, slow_timeout=slow_timeout))


def serving(stream: SseStream, peer: Peer) -> "asyncio.Task[bool]":
    return asyncio.create_task(stream.serve(peer.receive, peer.send, HEADERS))


async def done(task: "asyncio.Task[bool]") -> None:
    async with asyncio.timeout(30):
        await task


@asynccontextmanager
async def streaming(
    *, flows: bool = True, limit: int = 100
) -> AsyncGenerator[tuple[SseStream, Peer]]:
    """A stream and the peer that it is served to; it is cut at the end of the block.

    Args:
        flows: Whether the peer takes what it is sent.
    """
    stream, peer = stream_of(limit=limit), Peer()
    if not flows:
        peer.flows.clear()
    peer.served = serving(stream, peer)
    yield stream, peer
    stream.cut()
    await done(peer.served)


def now() -> float:
    return asyncio.get_running_loop().time()


# --- bytes ------------------------------------------------------------------------------------


def test_an_event_is_written_as_the_html_standard_reads_it() -> None:
    """``id``, ``event``, ``data``, an empty line."""
    assert sse_event(b'{"a":1}', "7") == b'id: 7\nevent: message\ndata: {"a":1}\n\n'
    assert sse_event(b"{}") == b"event: message\ndata: {}\n\n"


def test_a_priming_event_has_an_id_and_no_data() -> None:
    """2025-11-25: "an SSE event consisting of an event ID and an empty data field"."""
    assert priming_event("7") == b"id: 7\nretry: " + str(RETRY).encode() + b"\ndata: \n\n"


# --- the stream ------------------------------------------------------------------------------


async def test_what_is_pushed_is_sent_in_order_and_the_stream_ends_properly() -> None:
    """``finish``: "End the stream when everything that was pushed is sent"."""
    stream, peer = stream_of(), Peer()
    for chunk in (b"1", b"2", b"3"):
        stream.push(chunk)
    stream.finish()
    stream.push(b"too late")
    await done(serving(stream, peer))

    start = {"type": "http.response.start", "status": 200, "headers": HEADERS}
    assert peer.sent[0] == start
    assert peer.body == b"123"
    assert peer.is_complete
    assert stream.closed


async def test_what_waits_goes_in_one_piece() -> None:
    """Replay is "written in one go"."""
    async with streaming(limit=10**6) as (stream, peer):
        for number in range(1_000):
            stream.push(b"%d," % number)
        await cycles()
        assert len(peer.chunks) == 1


async def test_pushing_never_waits() -> None:
    """Rule 1: with no reader at all, and beyond the limit: ``full`` says so."""
    stream = stream_of(limit=10)
    stream.push(b"x" * 9)
    assert not stream.full
    stream.push(b"x" * 9)
    assert stream.full


async def test_a_stalled_reader_is_cut() -> None:
    """Rule 2: "A peer that takes nothing for ``slow_timeout`` seconds while the buffer is full is
    cut, whether somebody waits for room or nobody does".
    """
    stream, peer = stream_of(limit=10), Peer()
    peer.flows.clear()
    begun = now()
    task = serving(stream, peer)
    stream.push(b"x" * 20)
    await asyncio.sleep(9.9)
    assert not stream.closed
    await done(task)

    assert stream.closed
    assert 10 <= now() - begun <= 12


async def test_a_reader_that_takes_something_gets_its_time_anew() -> None:
    """Rule 2: "takes nothing"."""
    async with streaming(limit=10) as (stream, peer):
        for _ in range(10):
            peer.flows.clear()
            stream.push(b"x" * 20)
            await asyncio.sleep(9)
            assert not stream.closed
            peer.flows.set()
            await cycles()
        assert peer.body == b"x" * 200


async def test_a_reader_with_room_left_has_all_the_time() -> None:
    """Rule 2: "while the buffer is full"."""
    async with streaming(limit=100) as (stream, peer):
        peer.flows.clear()
        stream.push(b"x" * 99)
        await asyncio.sleep(10_000)
        assert not stream.closed
        peer.flows.set()
        await cycles()
        assert peer.body == b"x" * 99


async def test_room_is_waited_for_no_longer_than_the_timeout() -> None:
    """Rule 3: though the reader takes something now and then."""
    stream, peer = stream_of(limit=10), Peer()
    task = serving(stream, peer)
    peer.flows.clear()
    stream.push(b"x" * 20)
    await cycles()

    async def trickle() -> None:
        while not stream.closed:
            await asyncio.sleep(4)
            stream.push(b"x" * 20)
            peer.flows.set()
            await asyncio.sleep(0)
            peer.flows.clear()

    trickling = asyncio.create_task(trickle())
    begun = now()
    await stream.drain()
    assert now() - begun <= 10
    stream.cut()
    peer.flows.set()
    await done(task)
    await trickling


async def test_room_is_there_as_soon_as_the_reader_took_enough() -> None:
    """It wakes at once, not at the end of the timeout."""
    async with streaming(limit=10) as (stream, peer):
        peer.flows.clear()
        stream.push(b"x" * 20)
        await cycles()
        waiting = asyncio.create_task(stream.drain())
        await asyncio.sleep(3)
        begun = now()
        assert not waiting.done()
        peer.flows.set()
        await waiting
        assert now() == begun


async def test_room_in_an_empty_stream_lets_the_writer_run() -> None:
    """A handler that only emits would else fill the log before anything is written."""
    async with streaming(limit=10**9) as (stream, peer):
        await cycles()
        for _ in range(100):
            stream.push(b"x")
            await stream.drain()
        assert len(peer.body) >= 90


async def test_a_reader_that_leaves_ends_the_stream_at_once() -> None:
    """Rule 4: "The peer that went away is noticed at once, by ``http.disconnect``"."""
    stream, peer = stream_of(), Peer()
    task = serving(stream, peer)
    await cycles()
    begun = now()
    peer.gone.set()
    await done(task)
    assert now() == begun
    assert stream.closed


@pytest.mark.parametrize("error", [OSError("gone"), ConnectionResetError()])
async def test_a_server_that_says_so_by_an_error_is_understood(error: OSError) -> None:
    """Some servers raise when the peer is gone: that is how streams end, and no fault."""
    stream, peer = stream_of(), Peer()
    peer.breaks = error
    stream.push(b"x")
    await done(serving(stream, peer))
    assert stream.closed


async def test_a_fault_of_ours_is_not_swallowed() -> None:
    """Anything else is a fault, and must be seen."""
    stream, peer = stream_of(), Peer()
    peer.breaks = ValueError("a fault")
    with pytest.raises(ValueError, match="a fault"):
        await done(serving(stream, peer))


async def test_a_stream_that_is_cut_ends_properly_if_it_can() -> None:
    """The reader sees an end, not a broken connection; and nothing of what waited."""
    stream, peer = stream_of(), Peer()
    task = serving(stream, peer)
    await cycles()
    release = stream.hold()
    stream.push(b"x")
    stream.cut()
    await done(task)
    release()
    assert peer.is_complete
    assert peer.body == b""


async def test_a_stream_that_cannot_end_properly_ends_anyway() -> None:
    """Whoever cuts it does not wait for its reader."""
    stream, peer = stream_of(), Peer()
    peer.flows.clear()
    task = serving(stream, peer)
    stream.push(b"x")
    await cycles()
    begun = now()
    stream.cut()
    await done(task)
    assert now() - begun <= 1.5


async def test_a_silent_stream_sends_comments() -> None:
    """Promised: "a comment every 15 s", counted from the last event."""
    async with streaming() as (stream, peer):
        await asyncio.sleep(KEEP_ALIVE - 1)
        stream.push(b"x")
        await asyncio.sleep(KEEP_ALIVE - 1)
        assert peer.chunks == [b"x"]
        await asyncio.sleep(2)
        assert peer.chunks == [b"x", b": keep-alive\n\n"]
        await asyncio.sleep(KEEP_ALIVE * 3)
        assert peer.chunks[2:] == [b": keep-alive\n\n"] * 3


async def test_silent_streams_are_written_to_at_a_few_moments_and_not_all_at_one() -> None:
    """A process that woke up for one writes to others as well; what was sent to all at once is not
    followed by a comment to all at once.
    """

    class Timed(Peer):
        async def send(self, message: Message) -> None:
            await super().send(message)
            times.append(now())

    times: list[float] = []
    streams = [stream_of() for _ in range(100)]
    tasks = [serving(stream, Timed()) for stream in streams]
    for stream in streams:
        stream.push(b"x")
    await cycles()
    begun = now()
    times.clear()

    await asyncio.sleep(KEEP_ALIVE + 0.1)
    assert len(times) == 100
    assert all(KEEP_ALIVE - 1 < moment - begun <= KEEP_ALIVE for moment in times)
    moments = {round(moment, 3) for moment in times}
    assert 4 <= len(moments) <= 10
    for stream in streams:
        stream.cut()
    for task in tasks:
        await done(task)


async def test_a_held_stream_sends_nothing_until_it_is_released() -> None:
    """RES6; two holders, and one that releases twice."""
    async with streaming() as (stream, peer):
        first, second = stream.hold(), stream.hold()
        stream.push(b"x")
        await cycles()
        first()
        first()
        await cycles()
        assert peer.body == b""
        second()
        await cycles()
        assert peer.body == b"x"


async def test_what_is_purged_is_not_sent() -> None:
    """RES3: the events of one session are taken back, the others stay in order; and there is room
    again.
    """
    stream, peer = stream_of(limit=50), Peer()
    for number in range(30):
        stream.push(b"%02d" % number, A if number % 3 else B)
    assert stream.full
    stream.purge(A)
    assert not stream.full
    await stream.drain()
    stream.finish()
    await done(serving(stream, peer))
    assert peer.body == b"".join(b"%02d" % number for number in range(0, 30, 3))


async def test_a_purge_gives_a_stalled_reader_its_time_anew() -> None:
    """Rule 2: the buffer was not full in between."""
    async with streaming(limit=10) as (stream, peer):
        await cycles()
        release = stream.hold()
        stream.push(b"x" * 20, A)
        await asyncio.sleep(9)
        stream.purge(A)
        stream.push(b"y" * 20, B)
        await asyncio.sleep(9)
        assert not stream.closed
        release()
        await cycles()
        assert peer.body == b"y" * 20


# --- the feed ---------------------------------------------------------------------------------


class Log:
    """An event log behind an awaitable, which the test can stop."""

    def __init__(self, *, max_events: int = 1_000) -> None:
        self.log = EventLog(LogEpoch("1" * 19), Window(max_events, None, None))
        self.flows = asyncio.Event()
        self.flows.set()
        self.reads = 0
        self.is_away = False

    async def read(self, position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        self.reads += 1
        if self.is_away:
            raise StoreUnavailable("away")
        found = self.log.since_id(position, now=0)
        # Like a store on another machine: its answer is of then, not of now.
        await self.flows.wait()
        return found

    def add(self, text: str, origin: SessionId | None = None) -> LoggedEvent:
        return self.log.append(Draft(json.dumps(text).encode(), None, None, origin), now=0)

    @property
    def start(self) -> Position:
        return Position(LogEpoch("1" * 19), 0)


def texts(peer: Peer) -> list[Any]:
    lines = peer.body.decode().split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


@asynccontextmanager
async def feeding(
    log: Log, *, limit: int = 10**6, flows: bool = True, is_behind: bool = True
) -> AsyncGenerator[tuple[LogFeed, Peer]]:
    """What feeds a stream from this log, and the peer that the stream is served to."""
    async with streaming(flows=flows, limit=limit) as (stream, peer):
        yield LogFeed(stream, log.read, log.start, frame=plain_frame, is_behind=is_behind), peer


async def test_a_feed_sends_the_past_and_then_what_comes() -> None:
    """ATT6: "subscribe first, read history, merge"."""
    log = Log()
    for number in range(3):
        log.add(str(number))
    async with feeding(log) as (feed, peer):
        await cycles()
        for number in range(3, 6):
            feed.offer(log.add(str(number)))
        await cycles()

        assert texts(peer) == ["0", "1", "2", "3", "4", "5"]
        assert log.reads == 1


async def test_what_is_appended_while_the_past_is_read_is_not_lost() -> None:
    """ATT6: between the store's answer and its arrival: it was in neither."""
    log = Log()
    log.add("0")
    log.flows.clear()
    async with feeding(log) as (feed, peer):
        await cycles()
        feed.offer(log.add("1"))
        feed.offer(log.add("2"))
        log.flows.set()
        await cycles()

        assert texts(peer) == ["0", "1", "2"]
        feed.offer(log.add("3"))
        await cycles()
        assert texts(peer) == ["0", "1", "2", "3"]


async def test_an_event_that_was_read_already_is_not_sent_twice() -> None:
    """ATT6, CUP2: its append returned after the log had been read."""
    log = Log()
    late = log.add("0")
    async with feeding(log) as (feed, peer):
        await cycles()
        feed.offer(late)
        feed.offer(log.add("1"))
        await cycles()

        assert texts(peer) == ["0", "1"]


async def test_events_whose_appends_return_out_of_order_are_sent_in_order() -> None:
    """ATT6: two writers, one store, and the second received back first."""
    log = Log()
    async with feeding(log, is_behind=False) as (feed, peer):
        await cycles()
        first, second, third = log.add("0"), log.add("1"), log.add("2")
        for event in (second, first, third):
            feed.offer(event)
            await cycles()

        assert texts(peer) == ["0", "1", "2"]


async def test_a_full_stream_reads_on_from_the_log() -> None:
    """Rule 1: "what did not fit waits in its log, not here"; and it catches up."""
    log = Log()
    async with feeding(log, limit=200, is_behind=False, flows=False) as (feed, peer):
        for number in range(100):
            feed.offer(log.add(str(number)))
        await cycles()
        peer.flows.set()
        await cycles(500)

        assert texts(peer) == [str(number) for number in range(100)]
        assert max(map(len, peer.chunks)) < 300
        feed.offer(log.add("live"))
        await cycles()
        assert texts(peer)[-1] == "live"


async def test_a_window_that_moved_on_ends_the_stream() -> None:
    """CUP5: "Going on would leave a hole that nobody sees"."""
    log = Log(max_events=5)
    async with feeding(log, limit=100, is_behind=False, flows=False) as (feed, peer):
        for number in range(50):
            feed.offer(log.add(str(number)))
        peer.flows.set()
        await done(peer.served)

        seen = texts(peer)
        assert seen == [str(number) for number in range(len(seen))]
        assert len(seen) < 45


async def test_a_store_that_is_away_ends_the_stream() -> None:
    """HTP5: "The client comes back with its position and gets everything then"."""
    log, stream, peer = Log(), stream_of(), Peer()
    log.is_away = True
    feed = LogFeed(stream, log.read, log.start, frame=plain_frame)
    await done(serving(stream, peer))
    assert peer.is_complete
    assert feed.last == log.start.event_id()


@pytest.mark.parametrize("when", ["before", "while read", "after"])
async def test_the_stream_ends_after_the_final_event(when: str) -> None:
    """HTL10: whenever the answer came."""
    log, stream, peer = Log(), stream_of(limit=10**6), Peer()
    log.add("0")
    feed = LogFeed(stream, log.read, log.start, frame=plain_frame)
    if when == "before":
        feed.end_at(log.add("final").event_id)
    if when == "while read":
        log.flows.clear()
    task = serving(stream, peer)
    await cycles()
    if when != "before":
        feed.offer(log.add("final"), final=True)
    log.flows.set()
    await done(task)

    assert texts(peer) == ["0", "final"]
    assert peer.is_complete


async def test_a_final_event_that_was_read_already_ends_the_stream() -> None:
    """Its append returned after the log had been read."""
    log = Log()
    final = log.add("final")
    async with feeding(log) as (feed, peer):
        await cycles()
        feed.offer(final, final=True)
        await done(peer.served)
        assert texts(peer) == ["final"]


@pytest.mark.parametrize("found", ["an event", "a hole", "a store that is away"])
async def test_what_a_feed_was_reading_when_it_ended_is_nothing_to_the_others(found: str) -> None:
    """ATT6: a session left a connection while its log was read for it. That its log was refused,
    as that of a session which has ended, closed the connection with all its other sessions.
    """
    left, stays, stream, peer = Log(max_events=1), Log(), stream_of(limit=10**6), Peer()
    going = asyncio.Event()

    async def read(position: str) -> tuple[Sequence[LoggedEvent], Refusal | None]:
        await going.wait()
        return await left.read(position)

    for number in range(2 if found == "a hole" else 1):
        left.add(f"left {number}")
    left.is_away = found == "a store that is away"
    ended = LogFeed(stream, read, left.start, frame=plain_frame)
    other = LogFeed(stream, stays.read, stays.start, frame=plain_frame)
    task = serving(stream, peer)
    await cycles()
    ended.end()
    going.set()
    await cycles()
    other.offer(stays.add("stays"))
    await cycles()

    assert texts(peer) == ["stays"]
    stream.cut()
    await done(task)


async def test_a_frame_can_leave_an_event_out() -> None:
    """It is passed all the same: the feed's place moves on."""
    log, stream, peer = Log(), stream_of(limit=10**6), Peer()

    def frame(event: LoggedEvent) -> bytes | None:
        return None if event.payload == b'"secret"' else plain_frame(event)

    feed = LogFeed(stream, log.read, log.start, frame=frame)
    task = serving(stream, peer)
    await cycles()
    for text in ("a", "secret", "b"):
        feed.offer(log.add(text))
    await cycles()
    assert texts(peer) == ["a", "b"]
    feed.offer(log.add("secret"))
    assert feed.last.endswith("4")
    stream.cut()
    await done(task)


async def test_a_stream_ends_when_its_log_was_made_anew() -> None:
    """CUP8: the numbers of the new log are small again; taken for old ones, all of its events
    would be dropped in silence. A client that reconnects learns of it.
    """
    log = Log()
    async with feeding(log) as (feed, peer):
        for number in range(3):
            feed.offer(log.add(str(number)))
        await cycles()
        log.log = EventLog(LogEpoch("2" * 19), UNBOUNDED)

        feed.offer(log.add("new"))

        await done(peer.served)
        assert texts(peer) == ["0", "1", "2"]


async def test_streams_whose_peers_go_together_end_a_few_in_each_turn() -> None:
    """Ten thousand that were cut in one moment kept everybody else waiting for half a second."""
    turns = Turns(1)
    streams = [SseStream(SessionPolicy(), turns=turns) for _ in range(20)]
    peers = [Peer() for _ in streams]
    tasks = [serving(*each) for each in zip(streams, peers, strict=True)]
    await cycles(5)
    for peer in peers:
        peer.gone.set()
    ended = 0
    while ended < len(streams):
        await asyncio.sleep(0)
        before, ended = ended, sum(stream.closed for stream in streams)
        assert ended <= before + 1
    for task in tasks:
        await done(task)
