"""The stock clients, each behind the same few verbs, so that one test runs on all of them.

==================  ===================================================================
``python-2``        ``mcp.Client(mode="legacy")`` of the Python SDK 2.x, in this process
``fastmcp-4``       ``fastmcp.Client(mode="legacy")``, in this process
``python-1``        ``ClientSession`` of the Python SDK 1.x, in an environment of its own
``typescript-1``    ``Client`` of ``@modelcontextprotocol/sdk`` 1.x, on node
``typescript-2``    ``Client`` of ``@modelcontextprotocol/client`` 2.x, on node
==================  ===================================================================

``python-1-websocket`` and ``typescript-1-websocket`` are the same clients over WebSocket.

Nothing of a client is replaced or patched. All of them answer an elicitation with
``answer to <question>``, sampling with ``sampled <prompt>`` and roots with `ROOT_URI`.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, TypedDict, Unpack

from tests.support.board import Board

ClientKind = Literal[
    "python-2",
    "fastmcp-4",
    "python-1",
    "typescript-1",
    "typescript-2",
    "python-1-websocket",
    "typescript-1-websocket",
]
ROOT_URI = "file:///interop"
UPDATED = "notifications/resources/updated"

Message = dict[str, Any]


class StockClient(ABC):
    """One connected client and everything it was sent by the server."""

    kind: ClientKind

    def __init__(self) -> None:
        self.board = Board()

    @property
    @abstractmethod
    def messages(self) -> tuple[Message, ...]:
        """What the server sent, as JSON-RPC messages, in the order it arrived.

        ``fastmcp-4`` shows notifications only, and those without the members its models do
        not know; the others show each message as their transport parsed it.
        """

    @property
    @abstractmethod
    def logs(self) -> tuple[object, ...]:
        """The ``data`` of the log messages its logging callback was called with."""

    @property
    @abstractmethod
    def errors(self) -> tuple[str, ...]:
        """What its transport complained of on the side."""

    @property
    @abstractmethod
    def session_id(self) -> str | None: ...

    @abstractmethod
    async def list(
        self, what: Literal["tools", "resources", "templates", "prompts"]
    ) -> "list[str]":
        """The names (of resources: URIs, of templates: URI templates)."""

    @abstractmethod
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
        """Call a tool and return its text.

        Args:
            tool: Its name.
            arguments: Its arguments.
            progress: Ask for progress and collect the steps here as they come.
            tokens: Collect here the resumption tokens (SSE ids) the client hands out.
            resume_from: Do not send the call; resume its stream after this token.
            cancel_when: Await this and then cancel the call in the client's own way.

        Raises:
            Failed: The server or the client answered with an error, or it was cancelled.
            ToolFailed: The tool's result says that it is an error.
        """

    @abstractmethod
    async def read(self, uri: str) -> str: ...

    @abstractmethod
    async def prompt(self, name: str, arguments: dict[str, str]) -> str: ...

    @abstractmethod
    async def subscribe(self, uri: str) -> None: ...

    @abstractmethod
    async def unsubscribe(self, uri: str) -> None: ...

    @abstractmethod
    async def ping(self) -> None: ...

    @abstractmethod
    async def request(self, method: str, params: dict[str, Any] | None = None) -> Message:
        """Send a request of any method and return its raw result.

        Raises:
            Failed: The server answered with an error.
        """

    @property
    def initialize_result(self) -> Message:
        """The raw result of ``initialize``; it is the first response that arrived."""
        return next(m["result"] for m in self.messages if "result" in m)

    def notifications(self, method: str) -> "list[Message]":
        """The ``params`` of the notifications of this method, in the order they came."""
        return [m.get("params") or {} for m in self.messages if m.get("method") == method]

    def updated_uris(self) -> "list[str]":
        """The URIs of the ``resources/updated`` notifications, in the order they came."""
        return [params["uri"] for params in self.notifications(UPDATED)]

    async def until(self, is_so: Callable[[], bool], *, what: str, within: float = 30.0) -> None:
        """Return once ``is_so()``; it is asked again whenever the client is sent something.

        Raises:
            AssertionError: It was not so within ``within`` seconds.
        """
        await self.board.until(
            is_so,
            what=lambda: f"{what}; {self.kind} saw {self.messages} and complained {self.errors}",
            within=within,
        )

    async def updated(self, uri: str, *, times: int = 1, within: float = 30.0) -> None:
        """Return once ``resources/updated`` came for ``uri``, ``times`` times in all."""
        await self.until(
            lambda: self.updated_uris().count(uri) >= times,
            what=f"{times} × resources/updated of {uri}",
            within=within,
        )


class ToolFailed(Exception):
    """The tool's result has ``isError``; its text is the message."""


class How(TypedDict, total=False):
    """How a client connects, and how it leaves."""

    terminate: bool
    """Whether it sends DELETE when it is closed, as it does by default."""

    session_id: str | None
    """Join this transport-mode session, without ``initialize``."""

    protocol_version: str
    """The version of that session, for the request header."""


def connect(
    kind: ClientKind, driver_of: Callable[[ClientKind], Any], url: str, **how: Unpack[How]
) -> AbstractAsyncContextManager[StockClient]:
    """A client of this kind, connected; ``driver_of`` gives the process for those that have one."""
    # The clients import whole SDKs; each is only imported where it is used.
    match kind:
        case "python-2":
            from tests.interop.python2 import Python2

            return Python2.connected(url, **how)
        case "fastmcp-4":
            from tests.interop.fastmcp4 import FastMCP4

            assert how.get("session_id") is None, "FastMCP's client cannot be given a session id"
            assert how.get("terminate", True), "FastMCP's client always sends DELETE"
            return FastMCP4.connected(url)
        case _:
            from tests.interop.driven import Driven

            return Driven.connected(kind, driver_of(kind), url, **how)
