"""The client of this project, `resumable`: it comes back and repeats by itself.

What an application does is done here by hand, in raw messages. So a history has what `resumable`
gave to its application, and nothing of what it did for that.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import httpx2
from anyio.abc import TaskStatus
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from mcp_sessions import ReconnectPolicy, resumable
from mcp_sessions.client import sdk
from mcp_sessions.client.dialer import Down, Failed, Failure, LinkSettings, Received, Sink
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client.state import Runtime
from mcp_sessions.core.resume import FailureCause
from mcp_sessions.errors import OUTCOME_UNKNOWN
from tests.simulation.clients import Client, World, now
from tests.simulation.network import HttpLink, SocketLink
from tests.support.raw import Json, call_params, initialize_params

_URL: Final = "http://127.0.0.1:8000/mcp"
_LOOKS: Final = 0.5
"""Seconds between two looks whether there is a session."""


class OurClient(Client):
    gives_up = True
    mixes = True

    def __init__(self, world: World, plan: Json) -> None:
        super().__init__(world, plan)
        self._through = _Through(HttpLink(self.link, self.chosen, self.user))
        self._answers: dict[object, asyncio.Future[Json]] = {}
        self._write: Any = None
        self._ready = asyncio.Event()
        self._breaks = 0
        self._numbers = 0

    async def connect(self) -> None:
        self.run(self._live())
        await self._ready.wait()

    async def _live(self) -> None:
        transport = self._transport()
        async with transport as (read, self._write):
            self.run(self._begin(transport))
            async for item in read:
                self._take_in(
                    item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
                )

    def _transport(self) -> sdk.ResumableTransport:
        policy = ReconnectPolicy(
            give_up_after=self.plan.get("patience", ReconnectPolicy().give_up_after)
        )
        if self.plan.get("over") == "websocket":
            dialer = _SocketDialer(self._new_socket, self._through)
            return sdk.ResumableTransport([dialer], None, policy, _on_resume=self._came_back)
        through = httpx2.AsyncClient(transport=self._through)
        return resumable(_URL, http_client=through, on_resume=self._came_back, policy=policy)

    def _new_socket(self) -> SocketLink:
        return SocketLink(self.link, self.chosen(), self.user)

    async def _begin(self, transport: Any) -> None:
        params = initialize_params(self.name, capabilities=self.capabilities)
        answer = await self.until_asked("initialize", params)
        assert "result" in answer, answer
        await self._put({"method": "notifications/initialized"})
        while transport.session is None:  # noqa: ASYNC110
            await asyncio.sleep(_LOOKS)
        self.own = self.world.session_name(transport.session.session_id)
        self.note("owns", session=self.own)
        self._ready.set()

    def _came_back(self, outcome: ResumeOutcome) -> None:
        if outcome.is_new_session and self.own is not None:
            self.note("forgotten", session=self.own)
        if not outcome.recovered:
            self.note("gap")

    # --- messages ---------------------------------------------------------------------------------

    async def _put(self, message: Json) -> None:
        parsed = jsonrpc_message_adapter.validate_python(
            {"jsonrpc": "2.0", **message}, by_name=False
        )
        await self._write.send(SessionMessage(parsed))

    def _take_in(self, message: Json) -> None:
        if "method" not in message:
            waiting = self._answers.pop(message.get("id"), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
            return
        params: Json = message.get("params") or {}
        mark = params.get("progressToken")
        if message["method"] == "notifications/message":
            mark = params["data"]["mark"]
        self.hear(message, "events" if mark is None or self._through.breaks else str(mark))

    async def ask(self, method: str, params: Json) -> Json | None:
        self._numbers += 1
        answer = await self._sent(method, params, f"{self.name}/{self._numbers}")
        return answer if "result" in answer else None

    async def _sent(self, method: str, params: Json, number: str) -> Json:
        waiting: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self._answers[number] = waiting
        await self._put({"id": number, "method": method, "params": params})
        return await waiting

    async def post_reply(self, message: Json) -> None:
        await self._put(message)

    # --- what it does -----------------------------------------------------------------------------

    async def _subscribe(self, uri: str) -> None:
        await self.until_asked("resources/subscribe", {"uri": uri})
        self.note("subscribed", session=self.own, uri=uri)

    async def _take(self, step: Json) -> None:
        if step["do"] == "subscribe":
            await self._subscribe(step["uri"])
        else:
            await super()._take(step)

    async def call(self, mark: str, step: Json) -> None:
        arguments = {"mark": mark, "script": step["script"]}
        breaks = self._through.breaks
        self.sends(mark, step)
        if step.get("cut") is not None:
            self.run(self._cuts(step["cut"]))
        answer = await self._sent(
            "tools/call", call_params("work", arguments, {"progressToken": mark}), mark
        )
        error: Json = answer.get("error") or {}
        if "was not sent" in str(error.get("message")):
            answer["error"]["data"] = {"started": False}
        elif error.get("code") == OUTCOME_UNKNOWN:
            error.pop("data", None)
        self.answered(mark, answer, whole=breaks == self._through.breaks)

    async def _cuts(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.link.cut()


class _Through(httpx2.AsyncBaseTransport):
    """Requests of `httpx2` over a link."""

    def __init__(self, link: HttpLink) -> None:
        self._link = link
        self.breaks = 0
        """Responses that broke off."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in request.headers.raw]
        response = _Response(self)
        body = await request.aread()
        self._link.begin(response, request.method, "/mcp", headers, body)
        if response.has_ended:
            raise httpx2.ConnectError("nobody listens")
        return await response.begun(request)


class _Response(httpx2.AsyncByteStream):
    def __init__(self, through: _Through) -> None:
        self.error: BaseException | None = None
        self.leave = _not_yet
        self.is_whole = self.has_ended = False
        self._through = through
        self._begun: asyncio.Future[tuple[int, list[tuple[str, str]]]]
        self._begun = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes | None] = asyncio.Queue()

    def begin(self, status: int, headers: list[tuple[str, str]]) -> None:
        if not self._begun.done():
            self._begun.set_result((status, headers))

    def feed(self, chunk: bytes) -> None:
        self._chunks.put_nowait(chunk)

    def end(self) -> None:
        self.has_ended = True
        if not self._begun.done():
            self._through.breaks += 1
            # What became of the request is not known.
            self._begun.set_exception(httpx2.ReadError("the connection broke"))
            self._begun.exception()
        self._chunks.put_nowait(None)

    async def begun(self, request: httpx2.Request) -> httpx2.Response:
        try:
            status, headers = await self._begun
        except asyncio.CancelledError:
            self.leave()
            raise
        return httpx2.Response(status, headers=headers, stream=self, request=request)

    async def __aiter__(self) -> AsyncGenerator[bytes]:
        while (chunk := await self._chunks.get()) is not None:
            yield chunk
        if not self.is_whole:
            self._through.breaks += 1
            raise httpx2.ReadError("the connection broke")

    async def aclose(self) -> None:
        self.leave()


def _not_yet() -> None: ...


@dataclass
class _SocketDialer:
    """Opens WebSockets over a link, in place of the library's."""

    new_socket: Callable[[], SocketLink]
    through: _Through
    target: str = "ws://127.0.0.1:8000/mcp"

    def link(self) -> "_Socket":
        return _Socket(self)


class _Socket:
    """A `mcp_sessions.client.dialer.Link`."""

    kind = "websocket"

    def __init__(self, dialer: _SocketDialer) -> None:
        self.name = dialer.target
        self._dialer = dialer
        self._peer = dialer.new_socket()
        self._is_closing = False

    async def run(self, sink: Sink, *, task_status: TaskStatus[None]) -> None:
        peer = self._peer
        try:
            async with asyncio.timeout(_OPENS):
                await peer.open()
        except TimeoutError:
            await peer.leave()
        if peer.ended:
            cause = FailureCause.UNREACHABLE
            raise Failed(Failure(cause, f"{self.name}: no WebSocket", status=peer.refused))
        task_status.started()
        while not peer.ended or peer.messages:
            await peer.board.until(
                lambda: peer.ended or bool(peer.messages), what="a message", within=10_000
            )
            taken, peer.messages = peer.messages, []
            for message in taken:
                await sink(self, Received(message))
        self._dialer.through.breaks += 1
        if not self._is_closing:
            await sink(self, Down(Failure(FailureCause.CUT, f"{self.name}: it broke")))

    async def send(self, message: Json, headers: Mapping[str, str]) -> None:
        if self._peer.ended:
            raise Failed(Failure(FailureCause.CUT, f"{self.name}: the WebSocket is closed"))
        await self._peer.post(message)

    def configure(self, settings: LinkSettings) -> None: ...

    def listen(self) -> None: ...

    def abandon(self, request_id: str | int) -> None: ...

    async def close(self, *, leave: bool) -> None:
        self._is_closing = True
        await self._peer.leave()


_OPENS: Final = 10.0
"""Seconds that a handshake may take."""


@contextmanager
def decided_by_the_loop() -> Generator[None]:
    """Until the block ends, the clocks of `resumable` are the loop's."""
    before = sdk.Runtime
    setattr(sdk, "Runtime", partial(Runtime, clock=now, elapsed=now))  # noqa: B010
    try:
        yield
    finally:
        setattr(sdk, "Runtime", before)  # noqa: B010
