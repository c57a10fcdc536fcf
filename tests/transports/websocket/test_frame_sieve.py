"""Messages that are too large are taken from a WebSocket stream; the rest passes unchanged."""

import json
import struct

import pytest

from mcp_sessions_transports.websocket.frame_sieve import FrameSieve

HEAD = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
LARGE = json.dumps({"jsonrpc": "2.0", "id": 9, "result": {"t": "z" * 5_000}}).encode()
TEXT, MORE, CLOSE, PING = 1, 0, 8, 9


def frame(opcode: int, payload: bytes, *, last: bool = True) -> bytes:
    first = opcode | (0x80 if last else 0)
    if len(payload) < 126:
        return struct.pack("!BB", first, len(payload)) + payload
    return struct.pack("!BBH", first, 126, len(payload)) + payload


@pytest.mark.parametrize("step", [1, 2, 5, 1_000, 1_000_000])
def test_large_messages_are_replaced_and_nothing_else_changes(step: int) -> None:
    stream = [
        frame(TEXT, b"{}"),
        frame(TEXT, LARGE),
        frame(PING, b"one"),
        frame(TEXT, b'{"a":', last=False),
        frame(PING, b"within"),
        frame(MORE, b"1}"),
        frame(TEXT, LARGE[:600], last=False),
        frame(PING, b"within"),
        frame(MORE, LARGE[600:]),
        frame(CLOSE, b"\x03\xe8"),
    ]
    data = HEAD + b"".join(stream)
    sieve = FrameSieve(1_000)

    passed = b"".join(sieve.feed(data[at : at + step]) for at in range(0, len(data), step))

    assert passed.startswith(HEAD + stream[0])
    mark = passed[len(HEAD + stream[0]) :][:18]
    whole = frame(TEXT, b'{"a":1}')
    expected = [stream[0], mark, stream[2], stream[4], whole, stream[7], mark, stream[9]]
    assert passed == HEAD + b"".join(expected)
    for _ in range(2):
        dropped = sieve.dropped(mark[2:])
        assert dropped is not None
        assert (dropped.id, dropped.size) == (9, len(LARGE))
    assert sieve.dropped(mark[2:]) is None


def test_what_is_no_answer_to_the_handshake_passes_as_it_is() -> None:
    sieve = FrameSieve(10)
    refused = b"HTTP/1.1 403 Forbidden\r\nContent-Length: 9\r\n\r\n" + b"\x81\x7e\xff\xff" * 9
    assert sieve.feed(refused) + sieve.feed(b"more") == refused + b"more"


def test_what_is_far_too_large_is_not_waited_for() -> None:
    sieve = FrameSieve(10)
    sieve.feed(HEAD)
    endless = b"\x81\x7f" + (2**62).to_bytes(8, "big") + b"{"
    assert sieve.feed(endless) == endless
