"""Clients with bad tokens, for `bench_tokens`, a process of its own.

    python -m bench.flood PORT CONNECTIONS TOKENS

Each line of the file TOKENS is a token; each request has the next one. It works from each line
``go`` on its input to the next line: each connection sends a request when the one before is
answered, and connects again if it is closed. Then it says how many answers came, in how many
seconds.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Iterator

from bench.bench_noise import give_way

_BODY = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'


class Flood:
    def __init__(self, port: int, tokens: Iterator[bytes]) -> None:
        self._port = port
        self._tokens = tokens
        self.answers = 0

    async def connection(self) -> None:
        while True:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                while True:
                    writer.write(self._request())
                    head = await reader.readuntil(b"\r\n\r\n")
                    length = head.lower().partition(b"content-length: ")[2].split(b"\r", 1)[0]
                    await reader.readexactly(int(length))
                    self.answers += 1
                    if not head.startswith(b"HTTP/1.1 401"):
                        raise SystemExit(f"not refused: {head!r}")
            except (OSError, asyncio.IncompleteReadError):
                continue
            finally:
                writer.close()

    def _request(self) -> bytes:
        return (
            b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Accept: application/json, text/event-stream\r\nAuthorization: Bearer %b\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (next(self._tokens), len(_BODY), _BODY)
        )


async def run(flood: Flood, connections: int) -> None:
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while await loop.run_in_executor(None, sys.stdin.readline):
        begun, flood.answers = time.monotonic(), 0
        tasks = [asyncio.create_task(flood.connection()) for _ in range(connections)]
        await loop.run_in_executor(None, sys.stdin.readline)
        print(flood.answers, time.monotonic() - begun, flush=True)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    port, connections, path = sys.argv[1:]
    give_way()
    with open(path, "rb") as file:
        tokens = itertools.cycle(file.read().split())
    asyncio.run(run(Flood(int(port), tokens), int(connections)))


if __name__ == "__main__":
    main()
