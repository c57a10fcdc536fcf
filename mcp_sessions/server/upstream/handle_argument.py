"""Add the handle argument to tools of the wrapped server, as its lists allow."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from mcp_sessions import method_names
from mcp_sessions.core.handles import (
    carrying,
    extended,
    handle_in,
    is_extensible,
    with_handle,
)
from mcp_sessions.core.message import Message
from mcp_sessions.core.messages import members_of
from mcp_sessions.core.named import name_in
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.server.upstream.port import UpstreamCall, UpstreamPeer

logger = logging.getLogger(__name__)

_PAGES = 100
"""Pages of a list of tools that are read, at most."""

_INPUT = (
    "Names the session that this call goes on in: what the answer to an earlier call said. "
    "Leave it out to start a new session."
)
_OUTPUT = "Names the session that was started: pass it in later calls to go on in it."


@dataclass(slots=True, eq=False, repr=False)
class HandleArgument:
    tools: Sequence[str]
    name: str
    _takes: dict[str, bool] = field(init=False, default_factory=dict[str, bool])
    _structures: dict[str, bool] = field(init=False, default_factory=dict[str, bool])

    def tool_of(self, request: Message) -> str | None:
        if request.method != method_names.CALL_TOOL:
            return None
        tool = name_in(request.method, request.params)
        return tool if tool in self.tools else None

    def is_unknown(self, tool: str | None) -> bool:
        return tool is not None and tool not in self._takes

    def takes(self, tool: str | None) -> bool:
        """Whether a call of a tool may carry a handle. A tool that was never listed gets none."""
        return tool is not None and self._takes.get(tool, False)

    def given_in(self, request: Message) -> object:
        return handle_in(request.params, self.name)

    def check(self, listed: Iterable[Mapping[str, Any]]) -> None:
        for tool in listed:
            if tool["name"] in self.tools and not self._learn(tool):
                raise ConfigurationError(self._refusal(tool["name"]))
        for name in self.tools:
            if name not in self._takes:
                logger.warning("the server has no tool %s, which should take a handle", name)

    async def learn(self, peer: UpstreamPeer, call: UpstreamCall, request: Message) -> None:
        """Read the list that the sender of a call would see.

        Raises:
            UpstreamError: The server refuses to list its tools.
        """
        meta = request.only_meta
        cursor: object = None
        for _ in range(_PAGES):
            asked = meta if cursor is None else {**meta, "cursor": cursor}
            result = await peer.request(call, method_names.LIST_TOOLS, asked or None)
            self.listed(result)
            cursor = result.get("nextCursor")
            if cursor is None:
                return

    def listed(self, result: dict[str, Any]) -> dict[str, Any]:
        tools = result.get("tools")
        if not isinstance(tools, list):
            return result
        return {**result, "tools": [self._with_argument(tool) for tool in cast("list[Any]", tools)]}

    def _with_argument(self, tool: Any) -> Any:
        name = members_of(tool).get("name")
        if not isinstance(name, str) or name not in self.tools:
            return tool
        knew = self._takes.get(name)
        if not self._learn(tool):
            # Its list is made anew each time, so the start could not find this. The tool stays as
            # it is.
            if knew is not False:
                logger.error("%s: the tool stays as it is", self._refusal(name))
            return tool
        more = {"inputSchema": extended(tool["inputSchema"], self.name, _INPUT)}
        if tool.get("outputSchema") is not None and self._structures[name]:
            more["outputSchema"] = extended(tool["outputSchema"], self.name, _OUTPUT)
        return {**tool, **more}

    def _learn(self, tool: Mapping[str, Any]) -> bool:
        name, output = tool["name"], tool.get("outputSchema")
        takes = self._takes[name] = is_extensible(tool.get("inputSchema"), self.name)
        self._structures[name] = output is None or is_extensible(output, self.name)
        return takes

    def _refusal(self, tool: str) -> str:
        return f"the tool {tool} has an argument {self.name} of its own, or can have none more"

    def with_handle(self, tool: str, result: dict[str, Any], handle: str) -> dict[str, Any]:
        structured = self._structures.get(tool, False)
        said = with_handle(result, self.name, handle, self.tools, is_structured=structured)
        return carrying(said, handle)
