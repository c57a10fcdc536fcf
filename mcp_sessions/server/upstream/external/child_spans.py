"""Open the span of a request that a child serves, as the SDK does for its own requests."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Final

from opentelemetry.propagate import extract
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, get_tracer

from mcp_sessions import method_names
from mcp_sessions.core.messages import meta_of
from mcp_sessions.server.reporting.loggable import KnownNames, loggable_name
from mcp_sessions.server.upstream.external.other_replicas import ServedResult
from mcp_sessions.server.upstream.port import UpstreamCall, UpstreamError
from mcp_sessions.server.upstream.sdk.sdk_spans import CONVERSATION, SESSION_DIGEST, is_tracing

_TRACER: Final = "mcp_sessions"


class Spans:
    def __init__(self) -> None:
        self.are_made = False
        self._known = KnownNames()

    def look(self) -> None:
        self.are_made = is_tracing()

    async def around(
        self,
        call: UpstreamCall,
        method: str,
        params: Mapping[str, Any] | None,
        version: object,
        work: Awaitable[ServedResult],
    ) -> ServedResult:
        known = self._known
        # An unknown name may be an id: see `mcp_sessions.server.reporting.loggable`.
        name = loggable_name(params)
        target = known.name(method, name) if name is not None else None
        named = known.method(method) or "unknown"
        attributes = {"mcp.method.name": named, "mcp.protocol.version": str(version)}
        if call.request_id is not None:
            attributes["jsonrpc.request.id"] = str(call.request_id)
        if method == method_names.CALL_TOOL:
            attributes["gen_ai.operation.name"] = "execute_tool"
            attributes |= {"gen_ai.tool.name": target} if target is not None else {}
        elif method == method_names.GET_PROMPT and target is not None:
            attributes["gen_ai.prompt.name"] = target
        if call.session is not None:
            attributes |= {
                SESSION_DIGEST: call.session,
                CONVERSATION: call.conversation or call.session,
            }
        carried = extract(meta_of(params))
        with get_tracer(_TRACER).start_as_current_span(
            f"{named} {target}" if target else named,
            kind=SpanKind.SERVER,
            attributes=attributes,
            # A request without a parent becomes a child of the span that is open here.
            context=carried if get_current_span(carried).get_span_context().is_valid else None,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            call.is_traced(span)
            try:
                served = await work
            except UpstreamError as failed:
                code = str(failed.error.get("code"))
                span.set_attributes({"error.type": code, "rpc.response.status_code": code})
                span.set_status(StatusCode.ERROR, str(failed.error.get("message")))
                raise
            except Exception as failed:
                # The text of the error may hold anything.
                span.set_attribute("error.type", type(failed).__qualname__)
                span.set_status(StatusCode.ERROR)
                raise
            if method == method_names.CALL_TOOL and served[0].get("isError") is True:
                span.set_attribute("error.type", "tool_error")
                span.set_status(StatusCode.ERROR)
            else:
                known.served(method, name, served[0])
                if target is None and isinstance(name, str):
                    _name(span, method, known.name(method, name))
            return served


_NAMED_IN = {
    method_names.CALL_TOOL: "gen_ai.tool.name",
    method_names.GET_PROMPT: "gen_ai.prompt.name",
}


def _name(span: Span, method: str, target: str | None) -> None:
    if target is not None and method in _NAMED_IN:
        span.set_attribute(_NAMED_IN[method], target)
        span.update_name(f"{method} {target}")
