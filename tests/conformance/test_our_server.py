"""Our own server passes every vector, on every transport."""

import asyncio
import shlex
import socket
import sys
from contextlib import ExitStack

import pytest

from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.report import as_text
from mcp_sessions_conformance.runner import Run, Selection, play_one, run, why_not
from mcp_sessions_conformance.targets import Target, parse_target
from tests.conformance.conftest import CREDENTIALS, STDIO_COMMAND, served, way

WAYS = ("http/handshake", "http/modern", "websocket/handshake", "websocket/modern")
PATIENT = Limits(wait=15.0)
"""A loaded machine is no fault of the server's."""

SAMPLE = 17
"""Every so many vectors are played in the fast run."""


def as_websocket(url: str) -> str:
    return url.replace("http", "ws", 1)


def passed(done: Run) -> bool:
    """Whether everything did; the report explains a failure."""
    return done.is_conformant and done.count("warning") == 0


@pytest.mark.parametrize("name", WAYS)
async def test_a_sample_of_the_vectors_passes(
    name: str, server_url: str, vectors: list[Vector]
) -> None:
    here = way(name, server_url, PATIENT)
    chosen = [v for v in vectors if why_not(v, here, None) is None]
    # Another part on each way.
    for vector in chosen[WAYS.index(name) :: SAMPLE]:
        outcome = await play_one(vector, here, None, PATIENT)
        assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


async def test_a_session_moves_between_transports(server_url: str, vectors: list[Vector]) -> None:
    for vector in vectors:
        if vector.crosses:
            here, other = way(WAYS[0], server_url, PATIENT), way(WAYS[3], server_url, PATIENT)
            outcome = await play_one(vector, here, other, PATIENT)
            assert outcome.verdict == "passed", "\n".join([outcome.sentence, *outcome.wire])


async def test_the_vectors_of_a_pipe_pass(vectors: list[Vector]) -> None:
    only = frozenset(v.id for v in vectors if v.when.transports == ("stdio",))
    target = parse_target(f"stdio:{STDIO_COMMAND}")
    done = await run([target], vectors, selection=Selection(only=only), limits=PATIENT)
    assert len(done.outcomes) == 6
    assert passed(done), as_text(done)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_every_vector_passes_over_http_and_websocket(vectors: list[Vector]) -> None:
    """At the same time, each on its own server, since a vector waits for what must not come."""
    crossing = Selection(only=frozenset(v.id for v in vectors if v.crosses))
    with ExitStack() as servers:
        over_http, over_websocket, both = (servers.enter_context(served()) for _ in range(3))
        runs = await asyncio.gather(
            *(
                run(
                    [parse_target(url) for url in urls],
                    vectors,
                    selection=selection,
                    credentials=CREDENTIALS,
                    limits=PATIENT,
                )
                for urls, selection in (
                    ([over_http], None),
                    ([as_websocket(over_websocket)], None),
                    ([both, as_websocket(both)], crossing),
                )
            )
        )
    for done in runs:
        assert passed(done), as_text(done)
    played = {outcome.vector.id for done in runs for outcome in done.outcomes}
    assert {v.id for v in vectors if v.when.transports != ("stdio",)} == played


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_every_vector_passes_on_a_pipe(vectors: list[Vector]) -> None:
    done = await run([parse_target(f"stdio:{STDIO_COMMAND}")], vectors, limits=PATIENT)
    assert passed(done), as_text(done)


def through_the_bridge(url: str) -> Target:
    """A pipe to ``mcp-sessions bridge``, in front of the server at ``url``."""
    authorization = f"Authorization: Bearer {CREDENTIALS.token}"
    command = [sys.executable, "-m", "mcp_sessions.cli", "bridge", url, "--header", authorization]
    return parse_target(f"stdio:{shlex.join(command)}")


IN_SHORT = frozenset(
    {
        "a-dropped-answer-is-outcome-unknown",
        "a-list-change-is-received-once",
        "a-pipe-is-one-connection",
        "an-end-is-the-last-word",
        "ended-here-is-no-longer-current",
        "null-names-no-session",
        "resume-answers-before-it-replays",
        "rule-2-the-current-session",
        "updates-reach-who-subscribed",
        "what-needs-no-initialize",
    }
)


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_what_a_pipe_means_holds_through_the_bridge(
    scheme: str, server_url: str, vectors: list[Vector]
) -> None:
    target = through_the_bridge(server_url.replace("http", scheme, 1))
    done = await run([target], vectors, selection=Selection(only=IN_SHORT), limits=PATIENT)
    assert {outcome.vector.id for outcome in done.outcomes} == IN_SHORT
    assert passed(done), as_text(done)


CANCELS_BY_LEAVING = "a-notification-with-malformed-metadata-has-no-effect"
"""Over HTTP a client of 2026-07-28 cancels by leaving the response. The bridge does so, and its
metadata does not go along.
"""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_every_vector_of_a_pipe_passes_through_the_bridge(
    scheme: str, server_url: str, vectors: list[Vector]
) -> None:
    target = through_the_bridge(server_url.replace("http", scheme, 1))
    some = [each for each in vectors if scheme != "http" or each.id != CANCELS_BY_LEAVING]
    done = await run([target], some, limits=PATIENT)
    assert passed(done), as_text(done)


@pytest.mark.full
@pytest.mark.timeout(900)
async def test_sessions_move_between_a_pipe_and_the_network(vectors: list[Vector]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    targets = [f"stdio:{STDIO_COMMAND} --port {port}", f"http://127.0.0.1:{port}/mcp"]
    done = await run(
        [parse_target(text) for text in targets],
        vectors,
        selection=Selection(suites=frozenset({"cross-transport"})),
        limits=PATIENT,
    )
    assert passed(done), as_text(done)
    assert len({outcome.way for outcome in done.outcomes}) == 8
