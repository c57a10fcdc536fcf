"""Handle a store that fails a handler: its answer to the client, and its line in the log.

The SDK and FastMCP take any exception of a handler for a crash. They answer "Error executing tool",
and log a traceback. An unavailable store is no crash of the handler: the client gets the store's
error, and the log has one line.

A handler that deals with the failure itself keeps its own answer. So the answer is replaced only if
the handler crashed, and the store failed while it ran.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping
from typing import Any

from mcp.shared.exceptions import MCPError

from mcp_sessions.errors import StoreUnavailable
from mcp_sessions.server.upstream.port import UpstreamCall

_CRASHES = (
    "Error executing tool",
    "Error calling tool",
    "Error reading resource",
    "Error creating resource",
    "Error rendering prompt",
    "Error completing argument",
)
"""Beginnings of the text of a crash in the SDK and FastMCP. A handler's own error has its own
text.
"""

_LOGGERS = (
    "mcp.server.mcpserver.server",
    "fastmcp.server.server",
    "fastmcp.prompts.function_prompt",
)
"""Loggers that log a crash with its traceback."""


def filter_store_failures() -> None:
    """Filter the loggers of the SDK and of FastMCP, since the layer logs such a failure in one
    line.
    """
    for name in _LOGGERS:
        # Adding it again changes nothing.
        logging.getLogger(name).addFilter(_is_about_another)


def _is_about_another(record: logging.LogRecord) -> bool:
    raised = record.exc_info[1] if record.exc_info else None
    return raised is None or failure_in(raised) is None


def failure_in(raised: BaseException) -> StoreUnavailable | None:
    return next((each for each in _origins(raised) if isinstance(each, StoreUnavailable)), None)


def _origins(raised: BaseException) -> Generator[BaseException]:
    waiting, seen = [raised], set[int]()
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]
        waiting += getattr(each, "exceptions", ())


def failed_with(raised: Exception) -> StoreUnavailable | None:
    """Return the failure of the store that ended a handler. None: its error is another one, or its
    own.
    """
    if isinstance(raised, MCPError) and not raised.message.startswith(_CRASHES):
        return None
    return failure_in(raised)


def crashed_with(
    call: UpstreamCall, name: object, result: Mapping[str, Any]
) -> StoreUnavailable | None:
    """Return the failure of the store that made a tool crash. None: it did not crash, or handled
    it.

    Args:
        name: The tool's name.
    """
    failed = call.store_failure
    if failed is None or result.get("isError") is not True:
        return None
    match result.get("content"):
        case [{"type": "text", "text": str(text)}]:
            pass
        case _:
            return None
    # The SDK adds no text to a crash. FastMCP adds that of the exception.
    of_sdk, of_fastmcp = f"Error executing tool {name}", f"Error calling tool {name!r}"
    is_crash = text in (of_sdk, f"{of_sdk}: {failed}") or text.startswith(of_fastmcp)
    return failed if is_crash else None
