"""The wrapped agent: its methods are called here, and what it sends comes out here.

All that touches the inside of the ACP library is in this file: the router that finds an
agent's method and checks its params, and the connection object that an agent is handed in
``on_connect``, which here ends in a `Transport` of ours instead of a pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, cast

from acp import Agent, RequestError
from acp.agent.connection import AgentSideConnection
from acp.agent.router import build_agent_router
from pydantic import BaseModel, ValidationError

from mcp_sessions.acp import acp_errors
from mcp_sessions.acp.agent_questions import Json
from mcp_sessions.acp.open_conversation import CALL, Call
from mcp_sessions.background import WorkCancelled, ended_with_caller, watched

logger = logging.getLogger(__name__)


class Outlet(Protocol):
    async def sent(self, method: str, params: Json) -> None:
        """Take a notification; returns when it is stored and handed on.

        Raises:
            RequestError: It cannot be; the agent's call raises this.
        """
        ...

    def asked(self, method: str, params: Json, answered: Callable[[Json], None]) -> None: ...


class AcpAgent(Protocol):
    """An agent: any object with the methods of ``acp.Agent``, or with those that it needs."""

    @property
    def prompt(self) -> Callable[..., Awaitable[Any]]:
        """Answers ``session/prompt``, the only method that every agent needs."""
        ...


class AgentSide:
    def __init__(self, agent: AcpAgent, outlet: Outlet) -> None:
        self._agent = cast(Agent, agent)
        self._wire = _OutletWire(outlet)
        # Unstable methods of ACP are answered by the layer, or are the agent's own choice.
        self._router = build_agent_router(self._agent, use_unstable_protocol=True)
        self._connection: AgentSideConnection | None = None
        self._listening: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._connection = AgentSideConnection(self._agent, self._wire, listening=False)
        self._listening = asyncio.create_task(self._connection.listen(), name="acp agent")
        watched("the connection to the ACP agent", self._listening)

    async def stop(self) -> None:
        """Disconnect the agent. Its open requests fail."""
        if self._connection is not None and self._listening is not None:
            self._wire.answers.put_nowait(None)
            await asyncio.gather(self._listening, return_exceptions=True)
            await self._connection.close()

    def has(self, name: str) -> bool:
        """Whether the agent itself has a method. The stubs of the protocol class do not count."""
        # The library still takes agents whose methods have the names of its first versions.
        head, *rest = name.split("_")
        for spelling in (name, head + "".join(part.title() for part in rest)):
            method = getattr(self._agent, spelling, None)
            if callable(method):
                return getattr(method, "__func__", method) is not getattr(Agent, spelling, None)
        return False

    async def call(self, method: str, params: Mapping[str, Any], call: Call) -> Json:
        """Call the agent's method of that name on the wire; what it answers, as JSON.

        Raises:
            RequestError: The agent refused, failed, has no such method, or its params are
                not what the method takes.
        """
        try:
            return await ended_with_caller(self.called(method, params, call))
        except WorkCancelled:
            raise acp_errors.internal_error("the agent's task was cancelled") from None

    async def called(self, method: str, params: Mapping[str, Any], call: Call) -> Json:
        """Call the method in the caller's task, which must be one of its own: ``call``
        stays in it.
        """
        CALL.set(call)
        try:
            return _json_of(await self._router(method, dict(params), False))
        except RequestError:
            raise
        except ValidationError as error:
            raise acp_errors.invalid_params(explained(error)) from None
        except Exception as error:
            # The boundary to the agent's code, which may raise anything. As the library has
            # it, the client gets the text.
            logger.exception("the agent failed in %s", method)
            raise acp_errors.internal_error(str(error) or type(error).__name__) from error

    async def notify(self, method: str, params: Mapping[str, Any], call: Call) -> None:
        """Notify the agent. A failure is logged."""
        with contextlib.suppress(WorkCancelled):
            await ended_with_caller(self._notified(method, params, call))

    async def _notified(self, method: str, params: Mapping[str, Any], call: Call) -> None:
        CALL.set(call)
        try:
            await self._router(method, dict(params), True)
        except RequestError as error:
            logger.debug("the agent does not take %s: %s", method, error)
        except Exception:
            # The same boundary; nobody waits for an answer.
            logger.exception("the agent failed in %s", method)


class _OutletWire:
    """The library's ``Transport``. The agent writes to an `Outlet`, not to a pipe."""

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet
        self.answers: asyncio.Queue[Json | None] = asyncio.Queue()

    async def send(self, message: Json) -> None:
        method = cast(str, message["method"])
        params = cast("Json", message.get("params") or {})
        if "id" in message:
            request_id = message["id"]

            def answered(answer: Json) -> None:
                self.answers.put_nowait({"jsonrpc": "2.0", "id": request_id, **answer})

            self._outlet.asked(method, params, answered)
        else:
            await self._outlet.sent(method, params)

    async def receive(self) -> Json | None:
        return await self.answers.get()

    async def close(self) -> None:
        pass


def _json_of(result: object) -> Json:
    # As the library's own connection writes it.
    if isinstance(result, BaseModel):
        return result.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    if result is None:
        return {}
    if isinstance(result, dict):
        return cast("Json", result)
    raise acp_errors.internal_error(f"the agent answered with a {type(result).__name__}")


def explained(error: ValidationError) -> str:
    """Return which member is wrong, without its value, which may be a credential."""
    first = error.errors(include_input=False, include_context=False, include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    return f"{path or 'params'}: {first['msg']}"
