"""Calls that may run again do so (KEY17): the tool says that it is read-only or idempotent."""

from collections import Counter
from typing import Literal

import pytest
from mcp import Client, MCPError
from mcp.server import MCPServer
from mcp_types import ToolAnnotations

from mcp_sessions import (
    ReconnectPolicy,
    SessionLayer,
    TaskPolicy,
    is_outcome_unknown,
    resumable,
)
from tests.support.duplex import listening
from tests.support.resuming import MODES, Received, text_of

HINTS = {
    "reads": ToolAnnotations(read_only_hint=True),
    "sets": ToolAnnotations(idempotent_hint=True),
    "adds": ToolAnnotations(read_only_hint=False, idempotent_hint=False),
    "says_nothing": None,
}
SAFE = {"reads", "sets"}


def layer_of(runs: Counter[str], *, lost: int, as_tasks: bool = False) -> SessionLayer:
    """A server that loses the outcomes of the first runs of each tool."""
    mcp = MCPServer("notes")

    def add(name: str, hints: ToolAnnotations | None) -> None:
        @mcp.tool(name=name, annotations=hints)
        async def tool() -> str:
            runs[name] += 1
            if runs[name] <= lost:
                raise MCPError(-31012, "Outcome unknown")
            return str(runs[name])

        assert tool

    for name, hints in HINTS.items():
        add(name, hints)
    tasks = TaskPolicy(always=set(HINTS), poll_interval=0.02) if as_tasks else None
    return SessionLayer(mcp, tasks=tasks)


async def calls(
    runs: Counter[str],
    mode: str,
    repeat: Literal["safe", "never"],
    *,
    lost: int,
    lists: bool = True,
    as_tasks: bool = False,
    changes: bool = False,
) -> dict[str, str]:
    """What a client gets for one call of each tool."""
    layer, got = layer_of(runs, lost=lost, as_tasks=as_tasks), dict[str, str]()
    received = Received()
    policy = ReconnectPolicy(repeat=repeat)
    async with layer.lifespan(), listening(layer.asgi_app()) as port:
        transport = resumable(f"http://127.0.0.1:{port}/mcp", policy=policy)
        async with Client(transport, mode=mode, message_handler=received.on_message) as client:
            if lists:
                await client.list_tools()
            if changes:
                await layer.notify_tools_changed()
                changed = "notifications/tools/list_changed"
                await received.has(lambda: changed in received.methods, changed)
            for name in HINTS:
                try:
                    result = await client.call_tool(name, {})
                    got[name] = text_of(result)
                except MCPError as failed:
                    assert is_outcome_unknown(failed)
                    got[name] = "unknown"
    return got


@pytest.mark.parametrize("mode", MODES)
async def test_a_call_of_a_safe_tool_is_sent_again_and_no_other(mode: str) -> None:
    runs = Counter[str]()
    got = await calls(runs, mode, "safe", lost=1)
    assert got == {name: "2" if name in SAFE else "unknown" for name in HINTS}
    assert runs == {name: 2 if name in SAFE else 1 for name in HINTS}


async def test_a_call_that_became_a_task_is_sent_again_all_the_same() -> None:
    runs = Counter[str]()
    got = await calls(runs, "auto", "safe", lost=1, as_tasks=True)
    assert got == {name: "2" if name in SAFE else "unknown" for name in HINTS}
    assert runs == {name: 2 if name in SAFE else 1 for name in HINTS}


async def test_what_the_list_said_counts_only_until_it_has_changed() -> None:
    runs = Counter[str]()
    got = await calls(runs, "legacy", "safe", lost=1, changes=True)
    assert set(got.values()) == {"unknown"} and set(runs.values()) == {1}


@pytest.mark.parametrize("mode", MODES)
async def test_an_application_may_refuse_that_and_a_tool_that_was_not_listed_is_not_safe(
    mode: str,
) -> None:
    for repeat in ("never", "safe"):
        runs = Counter[str]()
        got = await calls(runs, mode, repeat, lost=1, lists=repeat == "never")
        assert set(got.values()) == {"unknown"} and set(runs.values()) == {1}


async def test_it_is_sent_again_a_few_times_and_not_for_ever() -> None:
    runs = Counter[str]()
    got = await calls(runs, "auto", "safe", lost=1_000)
    assert set(got.values()) == {"unknown"}
    assert runs["reads"] == 4
