"""The TypeScript v2 client in each era: the verbs of `Driven` and those of 2026-07-28."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Self

import anyio

from tests.interop.clients import Message, ToolFailed
from tests.interop.driven import Driven
from tests.interop.driver import Driver, Failed

Mode = Literal["auto", "2026-07-28", "legacy"]
"""How it negotiates: it probes, it is pinned to a version, or it shakes hands."""


class TypeScript2(Driven):
    """A ``Client`` of ``@modelcontextprotocol/client`` in the `Driver`'s process."""

    @classmethod
    def open(cls, driver: Driver, url: str, mode: Mode) -> AbstractAsyncContextManager[Self]:
        """Connect one and close it again; `opened` has ``era``, ``version``, ``server``,
        ``capabilities``.
        """
        return cls.connected("typescript-2", driver, url, mode=mode)

    @property
    def asked(self) -> tuple[str, ...]:
        return tuple(line["message"] for line in self._events("asked"))

    @property
    def updates(self) -> tuple[str, ...]:
        """The URIs its own handler of ``resources/updated`` was called with."""
        return tuple(line["uri"] for line in self._events("updated"))

    @property
    def closed(self) -> tuple[str, ...]:
        """How its listen streams ended: ``local``, ``graceful`` or ``remote``."""
        return tuple(line["how"] for line in self._events("closed"))

    async def discover(self) -> Message:
        return await self._run("discover")

    async def call_whole(
        self, tool: str, arguments: dict[str, Any] | None = None, *, log_level: str | None = None
    ) -> Message:
        """Call a tool; ``text`` and ``structured`` content.

        Args:
            log_level: Opt in to log messages of this level and above.

        Raises:
            Failed: The server or the client answered with an error.
            ToolFailed: The tool's result says that it is an error.
        """
        result = await self._run(
            "call",
            within=30,
            tool=tool,
            arguments=arguments or {},
            key=self.new_key(),
            log_level=log_level,
        )
        if result["is_error"]:
            raise ToolFailed(result["text"])
        return result

    async def listen(self, **wanted: Any) -> Message:
        """Open ``subscriptions/listen``; the filter that the server honours."""
        return await self._run("listen", filter=wanted)

    async def unlisten(self) -> str:
        """Close it; how it ended."""
        return await self._run("unlisten")

    def response(self, number: int = -1) -> Message:
        """One of the raw responses it got, the newest by default."""
        return [m for m in self.messages if "method" not in m][number]

    async def request_until(
        self, method: str, params: dict[str, Any], cancel_when: Callable[[], Awaitable[None]]
    ) -> None:
        """Send a request whose answer may take for ever; await this and then cancel it.

        Raises:
            Failed: The server answered with an error.
            AssertionError: It answered before it was cancelled.
        """
        key = self.new_key()
        is_cancelled = False

        async def cancel() -> None:
            nonlocal is_cancelled
            await cancel_when()
            is_cancelled = True
            await self._run("cancel", key=key)

        failed: Failed | None = None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel)
            try:
                await self._run("request", within=30, method=method, params=params, key=key)
            except Failed as error:
                # Raised below: out of here it would arrive wrapped in a group.
                failed = error
            if not is_cancelled:
                tasks.cancel_scope.cancel()
        if not is_cancelled:
            raise failed or AssertionError(f"{method} was answered: {self.response()}")
