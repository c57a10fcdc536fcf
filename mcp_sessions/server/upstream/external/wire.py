"""Define the wire of a child: a process has pipes, a URL has requests (``command.py``, ``url.py``).

A :class:`~mcp_sessions.server.upstream.external.child.Child` is a wire and an era. The wire writes,
streams and closes. It gives each message that comes to the child.

Read the messages that a server sends by itself, on one stream at a time that is opened again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from mcp_sessions.background import Background
from mcp_sessions.core.backoff import Backoff
from mcp_sessions.http_client.reopening import LEAST, LONGEST, Reopening
from mcp_sessions.server.upstream.external.child_requests import Client, Forgotten, Later, Waiting
from mcp_sessions.server.upstream.external.reading import Unreadable
from mcp_sessions.server.upstream.port import UpstreamCall, UpstreamError

logger = logging.getLogger(__name__)

SendOnce = Callable[[Mapping[str, Any]], Coroutine[Any, Any, dict[str, Any]]]
"""Sends a request with these params once, under an id of its own, and returns its result."""


class ChildConnection(Protocol):
    background: Background
    """Its tasks. They end with it."""

    @property
    def client(self) -> Client: ...

    @property
    def result(self) -> Mapping[str, Any]:
        """Result of ``initialize``. Empty: there is none yet."""
        ...

    @property
    def capabilities(self) -> Mapping[str, Any]: ...

    @property
    def level(self) -> str | None:
        """Lowest log level that it was set to. None: it decides itself."""
        ...

    @property
    def subscribed(self) -> set[str]: ...

    @property
    def is_modern(self) -> bool: ...

    @property
    def has_ended(self) -> bool: ...

    @property
    def failure(self) -> str:
        """Fault of the child that ended it, if there was one."""
        ...

    # --- for a wire ------------------------------------------------------------------------------

    def take(self, line: bytes, about: Waiting | None = None) -> Later | None:
        """Handle a message of the child.

        Args:
            about: The request on whose response the message comes. None: on none.

        Returns:
            Work that has to be done before the next message is handled.
        """
        ...

    def cannot_read(self, said: Unreadable, size: int) -> None:
        """Handle a text that is no message. If it answers a request, the request fails.

        Args:
            size: Its bytes, if they are noise.
        """
        ...

    def dropped(self, said: Unreadable, longest: int) -> bool:
        """Handle a message that is too large to be read. False: its kind is unknown.

        Args:
            longest: Bytes of a message, at most.
        """
        ...

    def leave_out(self, longest: int) -> None: ...

    def fail(self, waiting: Waiting, why: str) -> None: ...

    def warn(self, kind: str, text: str) -> None:
        """Log the first message of a kind. A server may repeat its fault without a bound."""
        ...

    def breaks(self, failure: str) -> None: ...

    def forget(self) -> None:
        """Accept no more requests: it has ended, or ends."""
        ...

    def give_up(self) -> None:
        """Fail all open requests: it has ended."""
        ...

    # --- for an era ------------------------------------------------------------------------------

    def next_id(self) -> int: ...

    async def exchange(
        self,
        request_id: int,
        call: UpstreamCall | None,
        method: str,
        params: Mapping[str, Any] | None,
    ) -> dict[str, Any]: ...

    def was_answered(self) -> None:
        """Note that it answers requests, so that a broken stream may work again."""
        ...

    def is_set_to(self, level: str | None) -> None: ...

    async def reopen_stream(self) -> None:
        """Open the stream of its own messages again, for all wanted changes."""
        ...

    def end_listen(self, request_id: object) -> None:
        """End a listen of the layer, which the child cancelled."""
        ...


class ChildWire(Protocol):
    def begin(self, child: ChildConnection) -> None:
        """Give the child each message from now on. Called once, before anything is sent."""
        ...

    def given_to(self, client: Client) -> None: ...

    def room(self) -> Coroutine[Any, Any, None] | None:
        """Return a wait for space to send more, which raises nothing. None: there is space."""
        ...

    def submit(self, waiting: Waiting, message: Mapping[str, Any]) -> None: ...

    def write(self, message: bytes) -> None:
        """Send a message that is no request. Never waits."""
        ...

    async def hand_over(self, message: bytes) -> None:
        """Send a message of a client that is no request, after those before it."""
        ...

    async def around(
        self, exchange: SendOnce, method: str, params: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Send a request of the modern era, with what the wire adds to it, and return its
        result.
        """
        ...

    def stream(self) -> ReadStream | None:
        """Return the stream of the child's own messages in the handshake era, not opened yet. None:
        it needs no stream.
        """
        ...

    async def listen(
        self,
        request_id: int,
        params: dict[str, Any],
        receiver: StreamReceiver,
        *,
        is_acknowledged: Callable[[], bool],
    ) -> float | None:
        """Send a listen of the modern era, and read its stream to its end; see :data:`ReadStream`.

        Args:
            is_acknowledged: Returns whether the listen was acknowledged.
        """
        ...

    def noise(self, size: int, why: str) -> None:
        """Handle bytes that are no message and answer nothing."""
        ...

    @property
    def pid(self) -> int | None: ...

    def memory(self) -> int | None:
        """Return the bytes that it takes on this machine. None: none, or the system does not say
        it.
        """
        ...

    async def stop(self) -> None: ...

    def kill(self) -> None: ...

    async def last_words(self) -> str:
        """Return how the child ended, in words for a client."""
        ...


_STREAM: Final = 1.0
"""Seconds that a caller waits for the stream. Some servers do not confirm it at once."""


class StreamReceiver(Protocol):
    async def begun(self, *, continues: bool) -> None:
        """Note that the stream is open.

        Args:
            continues: Whether it continues where it ended before, without a gap.
        """
        ...

    def progressed(self) -> None: ...


ReadStream = Callable[[StreamReceiver], Awaitable[float | None]]
"""Function that opens a stream for all wanted changes, and reads it until it ends. It returns the
seconds before the stream may be opened again, if the server names them.

Raises:
    Forgotten: The session has ended.
    UpstreamError: The stream is refused.
"""


class ServerStream:
    def __init__(
        self,
        background: Background,
        label: Callable[[], str],
        retry: float,
        *,
        missed: Callable[[], Awaitable[None]],
    ) -> None:
        self._background = background
        self._label = label
        self._retry = retry
        self._missed = missed
        self._task: asyncio.Task[None] | None = None
        self._stream: _Stream | None = None

    def answered(self) -> None:
        """Note that the server answers requests, so that a broken stream may work again."""
        if self._stream is not None:
            self._stream.sooner()

    async def begin_anew(self, read_stream: ReadStream) -> None:
        again = Reopening(self._retry)
        stream = _Stream(read_stream, self._missed, again, self._label, self._retry, self._task)
        self._stream = stream
        self._task = self._background.run("the stream for changes of a server", stream.run())
        # Otherwise changes until then would reach no client.
        await asyncio.wait({stream.tried}, timeout=_STREAM)


@dataclass(eq=False)
class _Stream:
    _read_stream: ReadStream
    _missed: Callable[[], Awaitable[None]]
    _reopening: Reopening
    _label: Callable[[], str]
    _retry: float
    _before: asyncio.Task[None] | None
    """Task of the stream before it."""

    def __post_init__(self) -> None:
        self.tried: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._has_gap = False
        self._is_needed = False
        """Whether it was open before: after a refusal it is then tried again."""

        self._was_begun = False
        """Whether the last try opened it."""

        self._answers = asyncio.Event()
        """Set once the server answered another request since the stream was last opened."""

        self._sooner = Backoff(base=self._retry, cap=LONGEST)
        """Delay after such an answer."""

    async def run(self) -> None:
        try:
            while True:
                self._reopening.opened()
                self._was_begun = False
                self._answers.clear()
                try:
                    retry = await self._read_stream(self)
                except Forgotten:
                    return
                except UpstreamError as refused:
                    if await self._made_room():
                        continue
                    if not self._is_needed:
                        # The server has no such stream.
                        return
                    logger.warning("%s: it sends no changes for now: %s", self._label(), refused)
                    retry = None
                self._has_gap = True
                self._set_tried()
                delay = self._reopening.delay(retry)
                # A server whose stream was open may name the time of the next try.
                await (asyncio.sleep(delay) if self._was_begun else self._pause(delay))
        finally:
            self._set_tried()
            if self._before is not None:
                self._before.cancel()

    async def begun(self, *, continues: bool) -> None:
        if self._before is not None:
            self._before.cancel()
            self._before = None
        has_gap, self._has_gap = self._has_gap and not continues, False
        self._is_needed = self._was_begun = True
        self._sooner.progressed()
        self._set_tried()
        if has_gap:
            await self._missed()

    def progressed(self) -> None:
        self._reopening.progressed()

    def sooner(self) -> None:
        self._answers.set()

    async def _pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._answers.wait()
                # The delay grows: the server may have no stream, even if it answers other requests.
                await asyncio.sleep(LEAST + self._sooner.failed(random.random()))

    async def _made_room(self) -> bool:
        """End the stream before, if there is one: some servers allow only one at a time."""
        before, self._before = self._before, None
        if before is None or before.done():
            return False
        before.cancel()
        await asyncio.wait({before})
        self._is_needed = self._has_gap = True
        return True

    def _set_tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)
