"""The client of this project over HTTP, `resumable`: it comes back and repeats by itself.

What an application does is done here by hand, in raw messages. So a history has what `resumable`
gave to its application, and nothing of what it did for that.
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import httpx2
from mcp.shared.message import SessionMessage
from mcp_types import jsonrpc_message_adapter

from mcp_sessions import ReconnectPolicy, resumable
from mcp_sessions.client import sdk
from mcp_sessions.client.reports import ResumeOutcome
from mcp_sessions.client.state import Runtime
from mcp_sessions.errors import OUTCOME_UNKNOWN
from tests.simulation.clients import Client, World, now
from tests.simulation.network import HttpLink
from tests.support.raw import Json, call_params, initialize_params

_URL: Final = "http://127.0.0.1:8000/mcp"
_LOOKS: Final = 0.5
"""Seconds between two looks whether there is a session."""


class OurClient(Client):
    gives_up = True

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
        through = httpx2.AsyncClient(transport=self._through)
        patience = self.plan.get("patience", ReconnectPolicy().give_up_after)
        transport = resumable(
            _URL, http_client=through, on_resume=self._came_back,
            policy=ReconnectPolicy(give_up_after=patience),
        )  # fmt: skip
        async with transport as (read, self._write):
            self.run(self._begin(transport))
            async for item in read:
                self._take_in(
                    item.message.model_dump(by_alias=True, mode="json", exclude_unset=True)
                )

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


@contextmanager
def decided_by_the_loop() -> Generator[None]:
    """Until the block ends, the clocks of `resumable` are the loop's."""
    before = sdk.Runtime
    setattr(sdk, "Runtime", partial(Runtime, clock=now, elapsed=now))  # noqa: B010
    try:
        yield
    finally:
        setattr(sdk, "Runtime", before)  # noqa: B010
