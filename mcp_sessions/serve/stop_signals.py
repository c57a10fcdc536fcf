"""Notice that the server of somebody else is told to stop: the server that runs our application.

ASGI tells an application only when every response has ended, and a stream ends with its server. So
each waits for the other. What a server is told is a signal. Rules, owned by
``tests/serve/test_stop_of_another_server.py``:

1. The handler of the server runs as before. Ours runs before it, and only notes the signal.
2. Where no handler stands for SIGTERM, no server ends gracefully, and none of ours is added. A
   server of ours drains by itself.
3. A server may put its handlers in place after the layer has started. It has done so when the first
   request comes.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType

from mcp_sessions.serve.uvicorn_server import DrainingServer

_Handler = Callable[[int, FrameType | None], object]


class StopSignals:
    """Calls ``leave`` at the first SIGTERM or SIGINT, in the event loop."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave = leave
        self._ours: dict[int, tuple[_Handler, _Handler]] = {}
        """Our handlers, and those before them."""

    def watch(self) -> None:
        """Add our handlers. Signals arrive in the main thread only: elsewhere there are none."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not callable(signal.getsignal(signal.SIGTERM)):
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            before = signal.getsignal(number)
            if not callable(before) or isinstance(
                getattr(before, "__self__", None), DrainingServer
            ):
                continue
            ours = partial(self._handle, loop, before)
            self._ours[number] = ours, before
            signal.signal(number, ours)

    def close(self) -> None:
        """Take our handlers away, where nobody has put another one in place."""
        for number, (ours, before) in self._ours.items():
            if signal.getsignal(number) is ours:
                signal.signal(number, before)

    def _handle(
        self,
        loop: asyncio.AbstractEventLoop,
        before: _Handler,
        number: int,
        frame: FrameType | None,
    ) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._leave)
        before(number, frame)
