"""Bytes that no peer may send, below JSON-RPC and in its answers: the report is written all the
same.
"""

import asyncio
import json
from typing import Any

import pytest

from mcp_sessions_conformance.loader import Vector
from mcp_sessions_conformance.peer import Limits
from mcp_sessions_conformance.report import as_json, as_text
from mcp_sessions_conformance.runner import Run, Selection, run
from mcp_sessions_conformance.targets import Credentials, parse_target
from mcp_sessions_conformance.values import SESSION, as_object
from tests.conformance.test_hostile_servers import (
    HASTY,
    Talk,
    after_the_upgrade,
    expect_failures,
    outcome,
    response,
    says,
    tcp,
)

TO_THE_END = Limits(wait=0.15, start=0.6, end=0.3, quiet=0.02, max_messages=300, give_up=0)
TOKENS = Credentials("one", "other", "weak")
SAMPLE = 19
"""Every so many vectors are played against each of these peers."""

ODD: dict[str, Any] = {
    "sessionId": 5,
    "sessionEventId": [],
    "session": {"sessionId": ["x"], "state": 5},
    "content": [5],
    "_meta": {SESSION: 7},
    "capabilities": {"extensions": [], "sessions": 1},
    "expiresAt": -1,
    "replayed": "x",
}
SURROGATES: dict[str, Any] = {
    "sessionId": "\ud800",
    "sessionEventId": "\u0000",
    "session": {"sessionId": "s\n", "state": "\r\n", "expiresAt": "2026-99-99T99:99:99Z"},
    "content": [{"text": "\ud800"}],
    "_meta": {SESSION: {"sessionId": "s" * 5000}},
    "expiresAt": "2026-99-99T99:99:99Z",
}
ANSWERS: dict[str, dict[str, Any]] = {
    "an odd result": {"result": ODD},
    "surrogates": {"result": SURROGATES},
    "a list": {"result": []},
    "an odd error": {"error": {"code": "x", "message": 5, "data": 7}},
    "a huge code": {"error": {"code": 10**400, "message": "\ud800"}},
    "a number that is none": {"error": {"code": float("nan")}},
    "odd questions": {"method": "elicitation/create", "params": 7},
    "an odd event": {"method": "notifications/x", "params": {"_meta": None, "sessionEventId": {}}},
}


def answers_with(members: dict[str, Any], kind: str) -> Talk:
    """A server that answers each request with these members, under its id."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                lines = [x for x in head.split(b"\r\n") if x.startswith(b"content-length:")]
                length = int(lines[0].partition(b":")[2]) if lines else 0
                asked = json.loads(await reader.readexactly(length) or b"null")
            except asyncio.IncompleteReadError:
                return
            except ValueError:
                asked = None
            request_id = as_object(asked).get("id")
            body = json.dumps({"jsonrpc": "2.0", "id": request_id, **members}).encode()
            if kind == "text/event-stream":
                body = b"retry: " + b"9" * 400 + b"\nid: \x00\ndata: " + body + b"\n\n"
            writer.write(response(body, kind=kind))

    return talk


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_of_odd_shapes_fail_vectors_and_nothing_else(
    name: str, kind: str, vectors: list[Vector]
) -> None:
    """No vector's failure is a line of the runner, whatever step looks at the answer."""
    start = list(ANSWERS).index(name) % SAMPLE
    async with tcp(answers_with(ANSWERS[name], kind)) as port:
        done = await run(
            [parse_target(f"http://127.0.0.1:{port}/mcp")],
            vectors[start::SAMPLE],
            limits=TO_THE_END,
            credentials=TOKENS,
        )
    assert done.is_complete and not done.is_conformant and not done.not_played
    assert len(done.outcomes) > 12
    assert not [o.sentence for o in done.outcomes if ".py" in o.sentence]
    # Both can be written where only UTF-8 is taken, or only ASCII.
    json.dumps(as_json(done)).encode("ascii")
    assert as_text(done).encode("ascii", "backslashreplace")


def http(rest: bytes, *, head: bytes = b"") -> bytes:
    """A response that begins well."""
    start = b"HTTP/1.1 200 OK\r\nmcp-session-id: x\r\ncontent-type: application/json\r\n"
    return start + head + b"\r\n" + rest


WIRES: dict[str, bytes] = {
    "nothing in it": http(b"", head=b"content-length: 0\r\n"),
    "204": b"HTTP/1.1 204 No Content\r\nmcp-session-id: x\r\n\r\n",
    "no chunk": http(b'zz\r\n{"jso', head=b"transfer-encoding: chunked\r\n"),
    "no gzip": http(b"abcde", head=b"content-encoding: gzip\r\ncontent-length: 5\r\n"),
    "an odd header": http(b"{}", head=b"mcp-session-id: \xff\xfe\r\ncontent-length: 2\r\n"),
    "a header without end": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 200_000,
    "100 for ever": b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
    "101": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
}


@pytest.mark.parametrize("name", WIRES)
async def test_http_that_is_none(name: str, vectors: list[Vector]) -> None:
    async with tcp(says(WIRES[name])) as port:
        await expect_failures(f"http://127.0.0.1:{port}/mcp", vectors)


async def test_a_chunked_answer_that_is_cut(vectors: list[Vector]) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65_536)
        writer.write(http(b'5\r\n{"jso', head=b"transfer-encoding: chunked\r\n"))

    async with tcp(talk) as port:
        done = await outcome(f"http://127.0.0.1:{port}/mcp", vectors)
    assert "RemoteProtocolError" in as_text(done) and ".py" not in as_text(done)


FRAMES: dict[str, bytes] = {
    "no UTF-8": b"\x81\x02\xff\xfe",
    "a reserved opcode": b"\x83\x00",
    "a length without end": b"\x81\x7f" + (1 << 62).to_bytes(8, "big") + b"x",
    "a fragment without end": b"\x01\x01{" + b"\x00\x01x" * 1000,
    "a continuation of nothing": b"\x80\x01x",
    "pings": b"\x89\x04ping" * 1000,
    "an odd close": b"\x88\x02" + (999).to_bytes(2, "big"),
    "half a close": b"\x88\x01x",
    "masked": b"\x81\x81\x00\x00\x00\x00x",
}


@pytest.mark.full
@pytest.mark.parametrize("name", FRAMES)
async def test_frames_that_are_none(name: str, vectors: list[Vector]) -> None:
    async def then(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(FRAMES[name])
        await reader.read()

    async with tcp(after_the_upgrade(then)) as port:
        done = await run(
            [parse_target(f"ws://127.0.0.1:{port}/mcp")],
            vectors,
            selection=Selection(only=frozenset({"start-answers-with-an-id"})),
            limits=HASTY,
        )
    assert len(done.outcomes) == 2 and done.count("passed") == 0, as_text(done)
    assert ".py" not in as_text(done)


async def test_a_server_that_is_killed_in_the_middle_of_a_run(
    server_url: str, vectors: list[Vector]
) -> None:
    """What it passed before is passed, and what nobody could ask it is not played."""
    upstream = int(server_url.rpartition(":")[2].partition("/")[0])
    dying = asyncio.Event()
    writers: list[asyncio.StreamWriter] = []

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if dying.is_set():
            return
        there = await asyncio.open_connection("127.0.0.1", upstream)
        writers.extend([writer, there[1]])

        async def one_way(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while data := await source.read(65_536):
                to.write(data)
            to.close()

        await asyncio.gather(
            one_way(reader, there[1]), one_way(there[0], writer), return_exceptions=True
        )

    def kill(_way: str, number: int, _of: int, _wrong: str) -> None:
        if number == 5:
            dying.set()
            for writer in writers:
                writer.transport.abort()

    done = Run([])
    # In one order: those with a server of their own are played beside the others.
    in_turn = [vector for vector in vectors if vector.when.other_server is None]
    async with tcp(relay) as port:
        await run(
            [parse_target(f"http://127.0.0.1:{port}/mcp")],
            in_turn,
            selection=Selection(eras=frozenset({"handshake"})),
            limits=HASTY,
            credentials=Credentials("alpha", "beta", "alpha-weak"),
            progress=kill,
            done=done,
        )
    assert done.is_complete and not done.is_conformant
    verdicts = [o.verdict for o in done.outcomes]
    assert verdicts[:5] == ["passed"] * 5, as_text(done)
    assert len(done.outcomes) == 5 + HASTY.give_up
    assert "passed" not in verdicts[5:]
    assert len(done.not_played) > 100
    assert ".py" not in as_text(done)
