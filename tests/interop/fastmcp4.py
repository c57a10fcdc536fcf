"""FastMCP's own ``Client``, in this process, in the handshake era."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal, Self

import fastmcp
import mcp_types as types
from fastmcp.client.elicitation import ElicitResult
from fastmcp.client.transports import StreamableHttpTransport
from mcp.client.session import ClientSession

from tests.interop.clients import ROOT_URI, Message
from tests.interop.python2 import InProcess, cancellable, text_of


class FastMCP4(InProcess):
    """``fastmcp.Client(mode="legacy")`` over its own Streamable HTTP transport."""

    kind = "fastmcp-4"

    def __init__(self, url: str) -> None:
        super().__init__()
        self._transport = StreamableHttpTransport(url)
        self._client: fastmcp.Client[StreamableHttpTransport] = fastmcp.Client(
            self._transport,
            mode="legacy",
            message_handler=self._note,
            log_handler=self.note_log,
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
    def session(self) -> ClientSession:
        return self._client.session

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

        async def answer() -> types.CallToolResult:
            callback = self.adding_to(progress)
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

    async def ping(self) -> None:
        await self._client.ping()

    async def _note(self, message: "types.ServerNotification | Exception") -> None:
        self.note(message)

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
