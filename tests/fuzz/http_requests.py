"""HTTP: requests as bytes on real sockets, damaged in their message, a header, or anywhere.

A request whose framing is whole is due a response: with a documented status, and in it a
documented answer. Of others only the connection's end, or an answer, is asked.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, cast

from tests.fuzz import messages
from tests.fuzz.echo import CODES, STATUSES, echo_server
from tests.fuzz.fuzzer import WITHIN, Fuzzer
from tests.fuzz.hostile import Hostile, shown
from tests.fuzz.served import Good, Served, served
from tests.support.modern import MODERN, routing_headers
from tests.support.raw import NEWEST, Json, RawClient, at_most

Headers = list[tuple[str, bytes]]

AT_ONCE = 6
"""Requests of one round, each on a connection of its own."""

GLANCE = 0.1
"""Seconds that a request that is due nothing gets."""

BY_THE_HTTP_SERVER = {431, 411, 505, 501, 417}
"""Statuses below the layer."""

ODD_HEADERS = (
    b"",
    b"*/*",
    b"null",
    b"x" * 9_000,
    b"=?base64?!?=",
    b"=?base64?////?=",
    b"\xff\xfe",
    b"application/json; charset=\xff",
    b",,,",
    b"-1",
    b"9" * 5_000,
    b"text/event-stream;q=nan",
    b"1, 2",
    b'"',
)
NAMES = (
    "Accept", "Content-Type", "Origin", "Mcp-Session-Id", "Last-Event-ID", "Mcp-Protocol-Version",
    "Mcp-Method", "Mcp-Name", "Mcp-Param-X", "Authorization", "Cookie", "X-Forwarded-For",
    "Forwarded", "Accept-Encoding", "Content-Encoding", "Traceparent",
)  # fmt: skip


class HttpDoor:
    def __init__(self, target: Served) -> None:
        self._target = target
        self._hostile_session = b""
        right: Json = {"text": "good"}
        self._good = Good(
            target.carrier, "echo", right, lambda result: result["structuredContent"] == right
        )

    async def expect_served(self) -> None:
        await self._good.expect_served()

    async def play(self, hostile: Hostile) -> None:
        # Of its own: one may delete it.
        self._hostile_session = await self._session()
        drawn = [self._drawn(hostile) for _ in range(hostile.random.randint(1, AT_ONCE))]
        async with asyncio.TaskGroup() as tasks:
            for pieces, is_due, expected in drawn:
                tasks.create_task(self._sent(pieces, is_due, expected))

    async def _session(self) -> bytes:
        client = RawClient(self._target.carrier)
        await at_most(WITHIN, client.initialize())
        assert client.session_id is not None
        return client.session_id.encode()

    def _drawn(self, hostile: Hostile) -> tuple[list[bytes], bool, object]:
        """Pieces of a request, whether it is due a response, and the id in that."""
        is_modern = hostile.chance(0.5)
        verb = hostile.one_of(*["POST"] * 8, "GET", "DELETE", "PUT", "OPTIONS")
        is_request = hostile.chance(0.8)
        asked: Json = (
            messages.request(hostile, hostile.one_of(1, "a", 0), modern=is_modern)
            if is_request
            else messages.other(hostile)
        )
        headers = self._headers(asked, is_modern=is_modern)
        body = json.dumps(asked).encode() if verb == "POST" else b""
        is_due, expected = True, asked.get("id")
        match hostile.random.randrange(8):
            case 0 | 1 | 2 if verb == "POST":
                body, expected = hostile.spoiled(asked), ...
            case 3 if verb == "POST":
                body, expected = hostile.damaged(body, hostile.noise()), ...
            case 4:
                self._odd_header(hostile, headers)
                expected = ...
            case 5:
                whole = self._badly_framed(hostile, verb, headers, body)
                return hostile.pieces(whole), False, ...
            case 6:
                whole = self._framed(verb, headers, body)
                return hostile.pieces(hostile.damaged(whole, whole)), False, ...
            case _:
                pass
        whole = self._framed(verb, headers, body)
        return hostile.pieces(whole), is_due, expected

    def _headers(self, message: Json, *, is_modern: bool) -> Headers:
        headers: Headers = [
            ("Host", f"127.0.0.1:{self._target.port}".encode()),
            ("Accept", b"application/json, text/event-stream"),
            ("Content-Type", b"application/json"),
            ("Mcp-Protocol-Version", (MODERN if is_modern else NEWEST).encode()),
        ]
        if is_modern:
            headers += [(n, v.encode("latin-1")) for n, v in routing_headers(message).items()]
        elif message.get("method") != "initialize":
            headers.append(("Mcp-Session-Id", self._hostile_session))
        return headers

    def _odd_header(self, hostile: Hostile, headers: Headers) -> None:
        name = hostile.one_of(*NAMES)
        if hostile.chance(0.3):
            headers[:] = [each for each in headers if each[0] != name]
        if hostile.chance(0.9):
            headers.append((name, hostile.one_of(*ODD_HEADERS)))

    def _framed(self, verb: str, headers: Headers, body: bytes, *more: bytes) -> bytes:
        lines = [f"{verb} /mcp HTTP/1.1".encode()]
        lines += [name.encode() + b": " + value for name, value in headers]
        lines += more or [b"Content-Length: %d" % len(body)]
        return b"\r\n".join([*lines, b"", body])

    def _badly_framed(self, hostile: Hostile, verb: str, headers: Headers, body: bytes) -> bytes:
        chunked = b"Transfer-Encoding: chunked"
        size = hostile.one_of(b"%x" % len(body), b"-1", b"f" * 20, b"zz", b"", b"0x5", b"5;x=\xff")
        in_chunks = size + b"\r\n" + body + b"\r\n" + hostile.one_of(b"0\r\n\r\n", b"0\r\nx", b"")
        said = hostile.one_of(b"-1", b"5", b"99999", b"9" * 5_000, b"1e3", b"0x5", b"", b"5, 6")
        match hostile.random.randrange(4):
            case 0:
                return self._framed(verb, headers, in_chunks, chunked)
            case 1:
                return self._framed(verb, headers, body, b"Content-Length: " + said)
            case 2:
                both = b"Content-Length: " + said
                return self._framed(verb, headers, in_chunks, chunked, both)
            case _:
                expects = b"Content-Length: %d\r\nExpect: 100-continue" % len(body)
                return self._framed(verb, headers, body, expects)

    async def _sent(self, pieces: list[bytes], is_due: bool, expected: object) -> None:
        """Send one request on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target.port)
        what = b"".join(pieces)
        try:
            async with asyncio.timeout(WITHIN if is_due else GLANCE):
                for piece in pieces:
                    writer.write(piece)
                    if len(pieces) < 10:
                        await asyncio.sleep(0)
                await self._expect_answer(reader, what, is_due, expected)
        except TimeoutError:
            assert not is_due, f"unanswered: {shown(what)}"
        except OSError:
            assert not is_due, f"the connection broke: {shown(what)}"
        finally:
            writer.transport.abort()

    async def _expect_answer(
        self, reader: asyncio.StreamReader, what: bytes, is_due: bool, expected: object
    ) -> None:
        try:
            status, headers, body = await _response(reader)
        except asyncio.IncompleteReadError:
            assert not is_due, f"ended without a response: {shown(what)}"
            return
        notified = f"{status} {body!r:.500} is the answer to {shown(what)}"
        assert status in STATUSES | BY_THE_HTTP_SERVER, notified
        if not is_due or headers.get("content-type") != "application/json" or not body:
            return
        answer = cast("dict[str, Any]", json.loads(body))
        assert ("result" in answer) != ("error" in answer), notified
        if "error" in answer:
            assert answer["error"]["code"] in CODES, notified
        if expected is not ...:
            assert answer.get("id") in (expected, None), notified


async def _response(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """One response; of a stream of events only its head."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip("\r\n").split("\r\n")
    status = int(first.split()[1])
    if status == 100:
        return await _response(reader)
    headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
    length = headers.get("content-length")
    return status, headers, await reader.readexactly(int(length)) if length else b""


@asynccontextmanager
async def _open() -> AsyncGenerator[HttpDoor]:
    async with served(echo_server()) as target:
        yield HttpDoor(target)


HTTP = Fuzzer("http", _open)
