"""FastMCP's own ``Client``, in this process, in the handshake era."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

import fastmcp
import mcp_types as types
from fastmcp.client.elicitation import ElicitResult
from fastmcp.client.logging import LogMessage
from fastmcp.client.transports import StreamableHttpTransport
from mcp import MCPError

from tests.interop.clients import ROOT_URI, Message, StockClient
from tests.interop.python2 import RawResult, cancellable, failed, text_of


class FastMCP4(StockClient):
    """``fastmcp.Client(mode="legacy")`` over its own Streamable HTTP transport."""

    kind = "fastmcp-4"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._messages: list[Message] = []
        self._logs: list[object] = []
        self._errors: list[str] = []
        self._transport = StreamableHttpTransport(url)
        self._client: fastmcp.Client[StreamableHttpTransport] = fastmcp.Client(
            self._transport,
            mode="legacy",
            message_handler=self._note,
            log_handler=self._note_log,
            elicitation_handler=self._elicit,
            sampling_handler=self._sample,
            roots=[ROOT_URI],
        )

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str) -> AsyncGenerator[Self]:
        """Open one and close it again."""
        self = cls(url)
        async with self._client:
            yield self

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def logs(self) -> tuple[object, ...]:
        return tuple(self._logs)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(self._errors)

    @property
    def session_id(self) -> str | None:
        return self._transport.get_session_id()

    @property
    def initialize_result(self) -> Message:
        result = self._client.initialize_result
        assert result is not None
        return result.model_dump(by_alias=True, mode="json", exclude_none=True)

    async def list(
        self, what: Literal["tools", "resources", "templates", "prompts"]
    ) -> "list[str]":
        match what:
            case "tools":
                return [tool.name for tool in await self._client.list_tools()]
            case "resources":
                return [str(r.uri) for r in await self._client.list_resources()]
            case "templates":
                listed = await self._client.list_resource_templates()
                return [template.uri_template for template in listed]
            case "prompts":
                return [prompt.name for prompt in await self._client.list_prompts()]

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
        assert tokens is None and resume_from is None, "FastMCP's client has no such thing"

        steps = progress

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            assert steps is not None
            steps.append(progress)
            self.board.announce()

        async def answer() -> types.CallToolResult:
            callback = on_progress if progress is not None else None
            return await self._client.call_tool_mcp(
                tool, arguments or {}, progress_handler=callback
            )

        return text_of(await cancellable(answer, cancel_when))

    async def read(self, uri: str) -> str:
        (content,) = await self._client.read_resource(uri)
        assert isinstance(content, types.TextResourceContents)
        return content.text

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        content = (await self._client.get_prompt(name, arguments)).messages[0].content
        assert isinstance(content, types.TextContent)
        return content.text

    async def subscribe(self, uri: str) -> None:
        await self._client.session.subscribe_resource(uri)  # pyright: ignore[reportDeprecated]

    async def unsubscribe(self, uri: str) -> None:
        await self._client.session.unsubscribe_resource(uri)  # pyright: ignore[reportDeprecated]

    async def ping(self) -> None:
        await self._client.ping()

    async def request(self, method: str, params: dict[str, Any] | None = None) -> Message:
        request = types.Request[dict[str, Any], str](method=method, params=params or {})
        try:
            result = await self._client.session.send_request(request, RawResult)
        except MCPError as error:
            raise failed(error) from error
        return result.model_dump(by_alias=True, mode="json")

    async def _note(self, message: "types.ServerNotification | Exception") -> None:
        if isinstance(message, Exception):
            self._errors.append(repr(message))
        else:
            self._messages.append(message.model_dump(by_alias=True, mode="json", exclude_none=True))
        self.board.announce()

    async def _note_log(self, message: LogMessage) -> None:
        self._logs.append(message.data)
        self.board.announce()

    async def _elicit(
        self, message: str, response_type: Any, params: Any, context: Any
    ) -> ElicitResult[dict[str, str]]:
        return ElicitResult(action="accept", content={"answer": f"answer to {message}"})

    async def _sample(
        self, messages: "list[types.SamplingMessage]", params: Any, context: Any
    ) -> str:
        content = messages[0].content
        assert isinstance(content, types.TextContent)
        return f"sampled {content.text}"
