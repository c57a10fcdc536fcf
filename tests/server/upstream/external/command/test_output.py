"""What a process writes: in lines, each once, in order, within bounds, and nobody starves."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.background import Background
from mcp_sessions.server.upstream.external.child_requests import Later
from mcp_sessions.server.upstream.external.output import CHUNK, Line, Lines, Output, TooLong

LONGEST = 40


class Pipe(asyncio.ReadTransport):
    def __init__(self) -> None:
        super().__init__()
        self.is_read = True

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True


class Reader:
    """Takes lines; those that begin with ``w`` have to be waited for."""

    def __init__(self, output: Output, background: Background) -> None:
        self.taken: list[bytes] = []
        self.ended = 0
        self.go_on = asyncio.Event()
        self._output = output
        self._background = background

    def read(self) -> None:
        self._output.read(LONGEST, self._take, self._has_ended, self._background)

    def _take(self, line: Line) -> Later | None:
        assert isinstance(line, bytes)
        if line == b"defect":
            raise ValueError(line)
        self.taken.append(line)
        return self._wait if line.startswith(b"w") else None

    async def _wait(self) -> None:
        await self.go_on.wait()
        self.taken.append(b"waited")

    def _has_ended(self) -> None:
        self.ended += 1


class World:
    def __init__(self) -> None:
        self.background = Background()
        self.pipe = Pipe()
        self.output = Output()
        self.output.opened(self.pipe)
        self.reader = Reader(self.output, self.background)

    async def quiet(self) -> None:
        """Nothing is running any more."""
        async with asyncio.timeout(5):
            while tasks := list(self.background.tasks):
                await asyncio.wait(tasks)


@pytest.fixture
async def w() -> AsyncGenerator[World]:
    made = World()
    yield made
    await made.background.close()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    slots = sorted({slot % (len(data) + 1) for slot in at})
    ends = [0, *slots, len(data)]
    return [data[a:b] for a, b in zip(ends, ends[1:], strict=False) if a < b]


LINES = st.lists(st.binary(max_size=2 * LONGEST).map(lambda line: line.replace(b"\n", b"")))


@given(LINES, st.binary(max_size=3 * LONGEST), st.lists(st.integers(0, 10_000)))
def test_lines_come_whole_however_they_are_cut(
    lines: list[bytes], rest: bytes, at: list[int]
) -> None:
    data = b"".join(line + b"\n" for line in lines) + rest.replace(b"\n", b"")
    splits = Lines(LONGEST)
    came = [line for chunk in cut(data, at) for line in splits.lines_in(chunk)]
    expected = [line for line in lines if line.strip() or len(line) > LONGEST]
    assert len(came) == len(expected)
    for line, whole in zip(came, expected, strict=True):
        if isinstance(line, TooLong):
            assert len(whole) > LONGEST and (line.head, line.tail) == (whole, whole)
        else:
            assert line == whole and len(whole) <= LONGEST


def test_of_a_line_that_is_too_long_the_ends_are_held() -> None:
    splits = Lines(LONGEST)
    head, tail = b"a" * CHUNK, b"z" * CHUNK
    came: list[Line] = []
    for chunk in (head, *[b"m" * CHUNK] * 50, tail, b"\nnext\n"):
        came += splits.lines_in(chunk)
        held = splits._held  # pyright: ignore[reportPrivateUsage]
        assert sum(map(len, held)) <= 2 * CHUNK
    (long, after) = came
    assert isinstance(long, TooLong)
    assert (long.head, long.tail, after) == (head, tail, b"next")


async def test_a_line_is_taken_in_the_turn_in_which_it_comes(w: World) -> None:
    w.reader.read()
    w.output.feed(b"a\nb\nhal")
    assert w.reader.taken == [b"a", b"b"]
    w.output.feed(b"f\n")
    assert w.reader.taken == [b"a", b"b", b"half"]
    assert not w.background.tasks


async def test_what_came_before_somebody_reads_is_not_lost(w: World) -> None:
    w.output.feed(b"a\n")
    w.output.end()
    w.reader.read()
    assert (w.reader.taken, w.reader.ended) == ([b"a"], 1)


async def test_what_comes_while_somebody_has_to_wait_is_taken_after_that(w: World) -> None:
    w.reader.read()
    w.output.feed(b"w1\nb\n")
    w.output.feed(b"c\n")
    w.output.end()
    await asyncio.sleep(0)
    assert w.reader.taken == [b"w1"]
    assert w.reader.ended == 0
    w.reader.go_on.set()
    await w.quiet()
    assert w.reader.taken == [b"w1", b"waited", b"b", b"c"]
    assert w.reader.ended == 1


async def test_who_makes_somebody_wait_is_not_read_without_end(w: World) -> None:
    w.reader.read()
    w.output.feed(b"w\n")
    w.output.feed(b"x" * (CHUNK // 2) + b"\n")
    assert w.pipe.is_read
    w.output.feed(b"w" * CHUNK)
    assert not w.pipe.is_read
    w.output.leave()
    assert w.pipe.is_read, "what it writes is read, and dropped, until it ends"
    w.output.feed(b"dropped\n" * CHUNK)
    assert w.pipe.is_read


async def test_what_is_held_before_somebody_reads_is_bounded(w: World) -> None:
    line = b"a" * (LONGEST - 1) + b"\n"
    w.output.feed(line * (2 * CHUNK // LONGEST))
    assert not w.pipe.is_read
    w.reader.read()
    await w.quiet()
    assert w.pipe.is_read
    assert len(w.reader.taken) == 2 * CHUNK // LONGEST


async def test_a_flood_of_lines_leaves_others_their_turn(w: World) -> None:
    w.reader.read()
    turns: list[int] = []

    async def other() -> None:
        while len(w.reader.taken) < 5_000:
            turns.append(len(w.reader.taken))
            await asyncio.sleep(0)

    parallel = asyncio.create_task(other())
    w.output.feed(b"a\n" * 5_000)
    async with asyncio.timeout(5):
        await parallel
    steps = [after - before for before, after in zip(turns, turns[1:], strict=False)]
    assert len(turns) > 100 and max(steps) <= 100


@pytest.mark.fails_in_background("reading from a child process")
async def test_a_defect_ends_the_reading_and_is_said(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    w.reader.read()
    w.output.feed(b"a\ndefect\nb\n")
    assert (w.reader.taken, w.reader.ended) == ([b"a"], 1)
    assert [record.getMessage() for record in caplog.records] == [
        "reading from a child process failed"
    ]


@pytest.mark.fails_in_background("reading from a child process")
async def test_a_defect_after_a_wait_ends_the_reading_as_well(
    w: World, caplog: pytest.LogCaptureFixture
) -> None:
    w.reader.read()
    w.reader.go_on.set()
    w.output.feed(b"w\ndefect\nb\n")
    await w.quiet()
    assert (w.reader.taken, w.reader.ended) == ([b"w", b"waited"], 1)
    assert len(caplog.records) == 1


async def test_who_leaves_while_it_waits_is_notified_once_that_it_has_ended(w: World) -> None:
    w.reader.read()
    w.output.feed(b"w\nb\n")
    await asyncio.sleep(0)
    await w.background.close()
    w.output.leave()
    w.output.end()
    assert (w.reader.taken, w.reader.ended) == ([b"w"], 1)
