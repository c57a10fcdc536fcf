"""A browser that has the page of the sessions open: a process of its own.

    python -m bench.watcher PORT

It opens the first view and follows it when its input says ``open``, and answers ``open`` when the
page is live. At ``close`` it closes the page, and answers with the number of changes that it got.
"""

from __future__ import annotations

import http.client
import sys
import threading


class Page:
    def __init__(self, port: int) -> None:
        self.changes = 0
        self._is_live = threading.Event()
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("GET", "/sessions/")
        first = self._connection.getresponse()
        assert first.status == 200 and b"sessions" in first.read(), first.status
        self._connection.request("GET", "/sessions/live/now")
        self._sock = self._connection.sock
        self._stream = self._connection.getresponse()
        assert self._stream.status == 200, self._stream.status
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert self._is_live.wait(60), "the page is not live"

    def _read(self) -> None:
        for line in self._stream:
            # A change ends with an empty line.
            if line == b"\n":
                self.changes += 1
                self._is_live.set()

    def close(self) -> None:
        import socket

        self._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join(20)
        self._connection.close()


def main() -> None:
    page: Page | None = None
    for line in sys.stdin:
        match line.strip():
            case "open":
                page = Page(int(sys.argv[1]))
                print("open", flush=True)
            case "close" if page is not None:
                page.close()
                print(page.changes, flush=True)
            case other:
                raise SystemExit(f"unknown step {other!r}")


if __name__ == "__main__":
    main()
