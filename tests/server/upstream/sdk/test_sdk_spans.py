"""The SDK's spans: a request of no trace makes none. One of a trace is in it without a provider."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
from mcp.server import MCPServer
from mcp.server._otel import OpenTelemetryMiddleware
from mcp.server.lowlevel.server import Server
from mcp_types import Icon
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mcp_sessions.server.upstream.sdk.sdk_peer import is_in_no_trace, untraced
from tests.support.modern import ModernClient
from tests.support.world import world

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


def passed_on() -> str:
    """What OpenTelemetry's own tracer makes of the trace if nothing records. Older
    releases drop it.
    """
    given = TraceContextTextMapPropagator().extract(PARENT)
    span = trace.NoOpTracer().start_span("any", given)
    return trace.format_trace_id(span.get_span_context().trace_id)


def server() -> MCPServer:
    """Its tool tells the trace that it is called in."""
    made = MCPServer("traced")

    @made.tool()
    async def current_trace() -> str:
        return trace.format_trace_id(trace.get_current_span().get_span_context().trace_id)

    return made


@pytest.mark.parametrize("era", ["handshake", "modern"])
async def test_a_handler_is_in_the_trace_that_its_request_names_though_nothing_records(
    era: str,
) -> None:
    """OpenTelemetry: without a provider the context of a trace is passed on all the same."""
    async with world(server=server()) as w:
        client: Any = ModernClient(w.carrier) if era == "modern" else await w.connected()

        assert await client.text("current_trace", meta=PARENT) == passed_on()
        assert await client.text("current_trace") == "0" * 32
        assert await client.text("current_trace", meta=PARENT) == passed_on()


async def test_a_request_of_no_trace_makes_no_span() -> None:
    called = Counter[str]()

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and "opentelemetry" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    async with world(server=server()) as w:
        client = await w.connected()
        await client.text("current_trace")
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            await client.text("current_trace")
        finally:
            sys.setprofile(before)

    # What the handler itself asks.
    assert "start_as_current_span" not in called
    assert called["get_current_span"] == 1


def test_only_known_members_of_the_metadata_are_of_no_trace() -> None:
    assert is_in_no_trace(None)
    assert is_in_no_trace({"name": "echo"})
    assert is_in_no_trace({"_meta": {"progressToken": 1}})
    assert not is_in_no_trace({"_meta": {"progressToken": 1, "b3": "0"}})
    assert not is_in_no_trace({"_meta": PARENT})


def test_a_server_without_its_tracing_has_all_else() -> None:
    async def kept(ctx: Any, call_next: Any) -> Any:
        return await call_next(ctx)

    icons = [Icon(src="https://example.com/icon.png")]
    plain, drawn = Server[Any]("plain", version="1"), Server[Any]("drawn", icons=icons)
    seen = untraced(plain)
    plain.middleware.append(kept)

    assert any(type(each) is OpenTelemetryMiddleware for each in plain.middleware)
    assert seen.middleware == [kept]
    assert seen.name == "plain"
    for each in (plain, drawn):
        stamp = untraced(each).server_info_stamp
        assert stamp == each.server_info_stamp
        # It is its receiver's, who may change it.
        stamp.clear()
        assert untraced(each).server_info_stamp == each.server_info_stamp != {}
