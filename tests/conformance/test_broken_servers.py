"""Every vector is caught failing: the table of faults, played."""

import asyncio
import sys
from contextlib import ExitStack

import pytest

from mcp_sessions_conformance.broken import WAYS, caught_by
from mcp_sessions_conformance.faults import FAULTS
from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.runner import Selection, play_one, run, why_not
from mcp_sessions_conformance.targets import Pipe, PipeWay, Target, parse_target
from tests.conformance.conftest import (
    CREDENTIALS,
    GOOD,
    QUICK,
    STDIO_COMMAND,
    behind_fault_proxy,
    served,
    way,
)

TABLE = caught_by()
SAMPLE = 23
"""Every so many lines of the table are played in the fast run."""

PARTS = 4
"""Of the table, which are played at the same time in the long run."""

SUITES = frozenset({"start-resume-end", "create-delete-state", "request-keys", "events"})
CONTROL = "sessions-are-optional"
"""A vector that no fault of sessions concerns."""


def test_the_table_has_every_vector_and_only_faults_that_there_are(vectors: list[Vector]) -> None:
    assert TABLE.keys() == {vector.id for vector in vectors}
    assert {fault for fault, _ in TABLE.values()} <= FAULTS.keys()


def test_a_fault_says_what_is_wrong() -> None:
    for name, fault in FAULTS.items():
        assert fault.name == name
        assert fault.says, name


async def expect_caught(lines: list[str], upstream: str, vectors: list[Vector]) -> None:
    """Each of these vectors fails on a server with its fault."""
    known = {vector.id: vector for vector in vectors}
    async with behind_fault_proxy(upstream) as (app, url):
        for vector_id in lines:
            vector, (fault, position) = known[vector_id], TABLE[vector_id]
            if vector.when.transports == ("stdio",):
                continue
            ways = [way(name, url, QUICK) for name in WAYS if not name.startswith("stdio")]
            if position is not None:
                ways = [way(position, url, QUICK)]
            here = next(each for each in ways if why_not(vector, each, None) in (None, ""))
            other = way("http/handshake", url, QUICK) if vector.crosses else None
            app.use(FAULTS[fault])
            outcome = await play_one(vector, here, other, QUICK)
            assert outcome.verdict == vector.severity, f"{vector_id} survives {fault}"
            assert "runner.py" not in outcome.sentence and "play.py" not in outcome.sentence


async def expect_unchanged(name: str, upstream: str, vectors: list[Vector]) -> None:
    """A sample of the vectors passes on this way through a proxy without a fault."""
    async with behind_fault_proxy(upstream) as (app, url):
        here = way(name, url)
        # A process that starts beside three others takes as long as the machine is busy.
        chosen = [
            v for v in vectors if why_not(v, here, None) is None and v.when.other_server is None
        ]
        for vector in chosen[::SAMPLE]:
            app.use(GOOD)
            outcome = await play_one(vector, here, None, here.limits)
            assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


async def test_without_a_fault_the_proxy_changes_nothing(vectors: list[Vector]) -> None:
    """Each way has its server, and all are played at once: vectors wait for what must not come."""
    names = ("websocket/handshake", "http/handshake", "http/modern")
    with ExitStack() as servers:
        urls = [servers.enter_context(served()) for _ in names]
        async with asyncio.TaskGroup() as ways:
            for name, url in zip(names, urls, strict=True):
                ways.create_task(expect_unchanged(name, url, vectors))


async def test_a_sample_of_the_table_is_caught(server_url: str, vectors: list[Vector]) -> None:
    await expect_caught(list(TABLE)[::SAMPLE], server_url, vectors)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_the_whole_table_is_caught(vectors: list[Vector]) -> None:
    """In parts, each on its own server, since a fault that keeps something back is waited for."""
    lines = list(TABLE)
    with ExitStack() as servers:
        urls = [servers.enter_context(served()) for _ in range(PARTS)]
        async with asyncio.TaskGroup() as parts:
            for number, url in enumerate(urls):
                parts.create_task(expect_caught(lines[number::PARTS], url, vectors))


@pytest.mark.full
@pytest.mark.timeout(400)
async def test_faults_of_a_pipe_are_caught(vectors: list[Vector]) -> None:
    command = f"{sys.executable} -m mcp_sessions_conformance.fault_pipe"
    for vector in vectors:
        if vector.when.transports != ("stdio",):
            continue
        fault, position = TABLE[vector.id]
        pipe = Pipe(Target("stdio", f"{command} {fault} {STDIO_COMMAND}"), QUICK)
        here = PipeWay(pipe, "modern" if position == "stdio/modern" else "handshake")
        try:
            outcome = await play_one(vector, here, None, QUICK)
        finally:
            await pipe.stop()
        assert outcome.verdict == vector.severity, f"{vector.id} survives {fault}"


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["one-id-for-all", "ignores-keys", "deaf", "any-state"])
async def test_a_broken_server_is_not_conformant(
    fault: str, server_url: str, vectors: list[Vector]
) -> None:
    """And what the fault does not concern passes all the same."""
    async with behind_fault_proxy(server_url) as (app, url):
        app.use(FAULTS[fault])
        target = parse_target(url.replace("http", "ws", 1))
        done = await run(
            [target],
            vectors,
            selection=Selection(suites=SUITES, eras=frozenset({"handshake"})),
            credentials=CREDENTIALS,
            limits=QUICK,
        )
    assert not done.is_conformant
    verdicts = {o.verdict for o in done.outcomes if o.vector.id == CONTROL}
    assert verdicts == {"passed"}
