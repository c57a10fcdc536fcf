"""The clients in a process of their own (``python-1``, ``typescript-1``, ``typescript-2``)."""

import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

import anyio

from tests.interop.clients import ClientKind, Message, StockClient, ToolFailed
from tests.interop.driver import Driver, Failed, Line

_handles = itertools.count(1)


class Driven(StockClient):
    def __init__(self, kind: ClientKind, driver: Driver) -> None:
        super().__init__()
        self.kind = kind
        self.board = driver.board
        self._driver = driver
        self._handle = f"client-{next(_handles)}"
        self.opened: Message = {}
        """What it knows once connected: ``session_id``, and ``typescript-2`` more of the server."""
        self._keys = itertools.count(1)

    @classmethod
    @asynccontextmanager
    async def connected(
        cls, kind: ClientKind, driver: Driver, url: str, **how: Any
    ) -> AsyncGenerator[Self]:
        """Open one in ``driver`` and close it again."""
        client = cls(kind, driver)
        client.opened = await client._run("connect", url=url, **how)
        try:
            yield client
        finally:
            with anyio.CancelScope(shield=True):
                await client._run("close")

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(line["message"] for line in self._events("message"))

    @property
    def logs(self) -> tuple[object, ...]:
        return tuple(line["data"] for line in self._events("log"))

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(line["text"] for line in self._events("error"))

    @property
    def session_id(self) -> str | None:
        return self.opened["session_id"]

    async def list(
        self, what: Literal["tools", "resources", "templates", "prompts"]
    ) -> "list[str]":
        return await self._run("list", what=what)

    async def call(
        self,
        tool: str,
        arguments: dict[str, Any] | None = None,
        *,
        progress: "list[float] | None" = None,
        tokens: "list[str] | None" = None,
        resume_from: str | None = None,
        cancel_when: Callable[[], Awaitable[None]] | None = None,
    ) -> str:
        key = self.new_key()
        if progress is not None:
            self._driver.collect(key, "progress", progress)
        if tokens is not None:
            self._driver.collect(key, "token", tokens)
        result: Any = None
        async with anyio.create_task_group() as tasks:
            if cancel_when is not None:
                tasks.start_soon(self._cancel, key, cancel_when)
            try:
                result = await self._run(
                    "call",
                    within=30,
                    tool=tool,
                    arguments=arguments or {},
                    key=key,
                    progress=progress is not None,
                    resume_from=resume_from,
                )
            except Failed as failed:
                # Raised below: out of here it would arrive wrapped in a group.
                result = failed
            tasks.cancel_scope.cancel()
        if isinstance(result, Failed):
            raise result
        if result["is_error"]:
            raise ToolFailed(result["text"])
        return result["text"]

    async def read(self, uri: str) -> str:
        return await self._run("read", uri=uri)

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        return await self._run("prompt", name=name, arguments=arguments)

    async def subscribe(self, uri: str) -> None:
        await self._run("subscribe", uri=uri)

    async def unsubscribe(self, uri: str) -> None:
        await self._run("unsubscribe", uri=uri)

    async def ping(self) -> None:
        await self._run("ping")

    async def request(self, method: str, params: dict[str, Any] | None = None) -> Message:
        return await self._run("request", method=method, params=params or {})

    def new_key(self) -> str:
        """For a request of this client that may be cancelled."""
        return f"{self._handle} {next(self._keys)}"

    async def _run(self, op: str, *, within: float = 20.0, **arguments: object) -> Any:
        return await self._driver.run(op, within=within, client=self._handle, **arguments)

    async def _cancel(self, key: str, when: Callable[[], Awaitable[None]]) -> None:
        await when()
        await self._run("cancel", key=key)

    def _events(self, event: str) -> "list[Line]":
        return [line for line in self._driver.events(self._handle) if line["event"] == event]
