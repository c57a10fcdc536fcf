"""The Python SDK's own ``Client``, in this process, in the handshake era."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Any, Literal, Self, Unpack

import anyio
import httpx2
import mcp_types as types
from mcp import Client, MCPError
from mcp.client.session import ClientRequestContext, ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.dispatcher import ProgressFnT
from mcp.shared.message import ClientMessageMetadata, SessionMessage
from pydantic import BaseModel, ConfigDict, FileUrl

from tests.interop.clients import ROOT_URI, How, Message, StockClient, ToolFailed
from tests.interop.driver import Failed

Streams = tuple[Any, Any]


class RawResult(BaseModel):
    """A result of any shape, with every member."""

    model_config = ConfigDict(extra="allow")


class _Tapped:
    """A transport that shows each message to ``saw`` before the client sees it.

    The client's typed models drop members they do not know, such as ``sessionEventId``.
    """

    def __init__(
        self, inner: AbstractAsyncContextManager[Streams], saw: Callable[[Any], None]
    ) -> None:
        self._inner = inner
        self._saw = saw

    async def __aenter__(self) -> Streams:
        read, write = await self._inner.__aenter__()
        return _TappedStream(read, self._saw), write

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._inner.__aexit__(exc_type, exc, traceback)


class _TappedStream:
    def __init__(self, inner: Any, saw: Callable[[Any], None]) -> None:
        self._inner = inner
        self._saw = saw

    @property
    def last_context(self) -> Any:
        return self._inner.last_context

    async def receive(self) -> Any:
        item = await self._inner.receive()
        self._saw(item)
        return item

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        item = await self._inner.__anext__()
        self._saw(item)
        return item

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc: Any) -> bool | None:
        return await self._inner.__aexit__(*exc)


async def answer_elicitation(
    context: ClientRequestContext, params: types.ElicitRequestParams
) -> types.ElicitResult:
    """What every client here answers."""
    return types.ElicitResult(action="accept", content={"answer": f"answer to {params.message}"})


async def answer_sampling(
    context: ClientRequestContext, params: types.CreateMessageRequestParams
) -> types.CreateMessageResult:
    """What every client here answers."""
    content = params.messages[0].content
    assert isinstance(content, types.TextContent)
    return types.CreateMessageResult(
        role="assistant",
        model="interop",
        content=types.TextContent(text=f"sampled {content.text}"),
    )


async def answer_roots(context: ClientRequestContext) -> types.ListRootsResult:
    """What every client here answers."""
    return types.ListRootsResult(roots=[types.Root(uri=FileUrl(ROOT_URI), name="interop")])


class InProcess(StockClient):
    """A client in this process, on a `ClientSession`: it keeps what it is sent in lists."""

    def __init__(self) -> None:
        super().__init__()
        self._messages: list[Message] = []
        self._logs: list[object] = []
        self._errors: list[str] = []

    @property
    @abstractmethod
    def session(self) -> ClientSession: ...

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(self._messages)

    @property
    def logs(self) -> tuple[object, ...]:
        return tuple(self._logs)

    @property
    def errors(self) -> tuple[str, ...]:
        return tuple(self._errors)

    async def subscribe(self, uri: str) -> None:
        await self.session.subscribe_resource(uri)  # pyright: ignore[reportDeprecated]

    async def unsubscribe(self, uri: str) -> None:
        await self.session.unsubscribe_resource(uri)  # pyright: ignore[reportDeprecated]

    async def request(self, method: str, params: dict[str, Any] | None = None) -> Message:
        request = types.Request[dict[str, Any], str](method=method, params=params or {})
        try:
            result = await self.session.send_request(request, RawResult)
        except MCPError as error:
            raise failed(error) from error
        return result.model_dump(by_alias=True, mode="json")

    def note(self, message: BaseModel | Exception) -> None:
        if isinstance(message, Exception):
            self._errors.append(repr(message))
        else:
            self._messages.append(message.model_dump(by_alias=True, mode="json", exclude_none=True))
        self.board.announce()

    async def note_log(self, params: types.LoggingMessageNotificationParams) -> None:
        self._logs.append(params.data)
        self.board.announce()

    def adding_to(self, steps: "list[float] | None") -> ProgressFnT | None:
        """The callback of a call that adds each step of its progress there."""

        async def on_progress(progress: float, total: float | None, message: str | None) -> None:
            assert steps is not None
            steps.append(progress)
            self.board.announce()

        return on_progress if steps is not None else None


class Python2(InProcess):
    """``mcp.Client(mode="legacy")`` over its own Streamable HTTP transport."""

    kind = "python-2"

    def __init__(self, session_id: str | None) -> None:
        super().__init__()
        self._session_id = session_id
        self._session: ClientSession
        self._client: Client | None = None

    @classmethod
    @asynccontextmanager
    async def connected(cls, url: str, **how: Unpack[How]) -> AsyncGenerator[Self]:
        """Open one and close it again."""
        session_id, terminate = how.get("session_id"), how.get("terminate", True)
        self = cls(session_id)
        headers: dict[str, str] = {}
        if session_id is not None:
            headers["mcp-session-id"] = session_id
        if "protocol_version" in how:
            headers["mcp-protocol-version"] = how["protocol_version"]
        async with httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(30, read=300),
            event_hooks={"response": [self._note_session_id]},
        ) as http:
            transport = _Tapped(
                streamable_http_client(url, http_client=http, terminate_on_close=terminate),
                self._note,
            )
            if session_id is None:
                async with Client(
                    transport,
                    mode="legacy",
                    client_info=types.Implementation(name="python-2", version="1.0"),
                    elicitation_callback=answer_elicitation,
                    sampling_callback=answer_sampling,
                    list_roots_callback=answer_roots,
                    logging_callback=self.note_log,
                ) as self._client:
                    self._session = self._client.session
                    yield self
            else:
                # `Client` always shakes hands; a session that exists needs the layer below.
                async with transport as (read, write):
                    async with ClientSession(read, write) as self._session:
                        yield self

    @property
    def session(self) -> ClientSession:
        return self._session

    @property
    def session_id(self) -> str | None:
        return self._session_id

    async def list(
        self, what: Literal["tools", "resources", "templates", "prompts"]
    ) -> "list[str]":
        match what:
            case "tools":
                return [tool.name for tool in (await self._session.list_tools()).tools]
            case "resources":
                return [r.uri for r in (await self._session.list_resources()).resources]
            case "templates":
                listed = await self._session.list_resource_templates()
                return [template.uri_template for template in listed.resource_templates]
            case "prompts":
                return [prompt.name for prompt in (await self._session.list_prompts()).prompts]

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
        async def on_token(token: str) -> None:
            if tokens is not None:
                tokens.append(token)
                self.board.announce()

        async def answer() -> types.CallToolResult:
            callback = self.adding_to(progress)
            if tokens is None and resume_from is None and self._client is not None:
                return await self._client.call_tool(tool, arguments, progress_callback=callback)
            return await self._session.send_request(
                types.CallToolRequest(
                    params=types.CallToolRequestParams(name=tool, arguments=arguments)
                ),
                types.CallToolResult,
                metadata=ClientMessageMetadata(
                    resumption_token=resume_from, on_resumption_token_update=on_token
                ),
                progress_callback=callback,
            )

        return text_of(await cancellable(answer, cancel_when))

    async def read(self, uri: str) -> str:
        (content,) = (await self._session.read_resource(uri)).contents
        assert isinstance(content, types.TextResourceContents)
        return content.text

    async def prompt(self, name: str, arguments: dict[str, str]) -> str:
        content = (await self._session.get_prompt(name, arguments)).messages[0].content
        assert isinstance(content, types.TextContent)
        return content.text

    async def ping(self) -> None:
        await self._session.send_ping()

    def _note(self, item: SessionMessage | Exception) -> None:
        self.note(item if isinstance(item, Exception) else item.message)

    async def _note_session_id(self, response: httpx2.Response) -> None:
        self._session_id = response.headers.get("mcp-session-id", self._session_id)


async def cancellable(
    answer: Callable[[], Awaitable[types.CallToolResult]],
    cancel_when: Callable[[], Awaitable[None]] | None,
) -> types.CallToolResult:
    """Await ``answer()``; cancel it as anyio does once ``cancel_when()`` returns.

    Raises:
        Failed: An error was answered, or it was cancelled.
    """
    try:
        if cancel_when is None:
            return await answer()
        result: types.CallToolResult | None = None
        async with anyio.create_task_group() as tasks:

            async def cancel() -> None:
                await cancel_when()
                tasks.cancel_scope.cancel()

            tasks.start_soon(cancel)
            result = await answer()
            tasks.cancel_scope.cancel()
        if result is None:
            raise Failed(None, "cancelled")
        return result
    except MCPError as error:
        raise failed(error) from error


def failed(error: MCPError) -> Failed:
    return Failed(error.error.code, error.error.message, error.error.data)


def text_of(result: types.CallToolResult) -> str:
    """The text of a tool's result.

    Raises:
        ToolFailed: The result is an error.
    """
    content = result.content[0]
    assert isinstance(content, types.TextContent)
    if result.is_error:
        raise ToolFailed(content.text)
    return content.text
