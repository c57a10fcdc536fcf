"""Decompress the body of an HTTP response in pieces of bounded size.

A compressed body may be a thousand times as large as it was on the wire, and the HTTP client's own
decoding makes all of it from one piece. Here no piece is larger than `PIECE`, so that the reader
can stop in time.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing

import httpx2

ACCEPTED = "gzip"
"""For ``Accept-Encoding``: what can be read here."""

PIECE = 65_536
"""Bytes of one piece at the most."""

_GZIP = 16 + zlib.MAX_WBITS


class ResponseTooLarge(Exception):
    """A body has more bytes than the limit."""


async def pieces(response: httpx2.Response) -> AsyncGenerator[bytes]:
    """The decompressed body of a response that was opened as a stream.

    Raises:
        httpx2.DecodingError: It is compressed in a way that nobody asked for, or wrongly.
    """
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise httpx2.DecodingError("the response is compressed in a way that was not asked for")
    decoder = _Gzip() if encoding.endswith("gzip") else None
    async with aclosing(response.aiter_raw()) as chunks:
        async for chunk in chunks:
            if decoder is None:
                yield chunk
                continue
            for piece in decoder.decode(chunk):
                yield piece


async def whole(body: AsyncGenerator[bytes], *, limit: int) -> bytes:
    """Read the pieces of a body, and close them.

    Raises:
        ResponseTooLarge: It has more than ``limit`` bytes. No more than that was kept.
    """
    kept = bytearray()
    async with aclosing(body) as found:
        async for piece in found:
            kept += piece
            if len(kept) > limit:
                raise ResponseTooLarge
    return bytes(kept)


class _Gzip:
    def __init__(self) -> None:
        self._member = zlib.decompressobj(_GZIP)

    def decode(self, data: bytes) -> Generator[bytes]:
        while data:
            try:
                piece = self._member.decompress(data, PIECE)
            except zlib.error as error:
                raise httpx2.DecodingError("the response is not what gzip makes") from error
            if piece:
                yield piece
            if self._member.eof:
                data = self._member.unused_data
                self._member = zlib.decompressobj(_GZIP)
            else:
                data = self._member.unconsumed_tail
                if not data and len(piece) == PIECE:
                    yield from self._rest()

    def _rest(self) -> Generator[bytes]:
        while piece := self._member.decompress(b"", PIECE):
            yield piece
