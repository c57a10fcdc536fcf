"""Apply the SDK's rules for a 2026-07-28 request over HTTP before it is served.

The ladder of checks is the SDK's own, in its order, with its texts and statuses. The tests compare
the two over a corpus of requests. A request that passes is served by us.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from mcp.server._streamable_http_modern import (
    _mcp_param_rejection as mcp_param_rejection,  # pyright: ignore[reportPrivateUsage]
)
from mcp.shared.inbound import (
    ERROR_CODE_HTTP_STATUS,
    X_MCP_HEADER_KEY,
    InboundLadderRejection,
    InboundModernRoute,
    classify_inbound_request,
    find_duplicated_routing_header,
    find_invalid_x_mcp_header,
    mcp_param_headers,
    unsupported_protocol_version_rejection,
    validate_mcp_param_headers,
    x_mcp_header_map,
)
from mcp_types import (
    HEADER_MISMATCH,
    JSONRPCNotification,
    JSONRPCRequest,
)
from pydantic import ValidationError
from starlette.requests import Request as HttpRequest

from mcp_sessions import method_names
from mcp_sessions.core.messages import (
    PROTOCOL_VERSION_META,
    Notification,
    Request,
    decode,
    error_body,
    members_of,
    meta_of,
)
from mcp_sessions.errors import INVALID_REQUEST, METHOD_NOT_FOUND, PARSE_ERROR
from mcp_sessions.protocol_versions import Eras
from mcp_sessions.server.upstream.modern_rules import ModernRefusal
from mcp_sessions.server.upstream.sdk.kernel import HANDSHAKE_VERSIONS, SdkUpstream
from mcp_sessions.stores.records import Peer

SchemaOf = Callable[[str], Mapping[str, Any] | None]

_VERSION_HEADER: Final = "mcp-protocol-version"
_LEVELS: Final = 500
"""Levels of a body that any code reads, here and in the SDK."""

_PLAIN_TOOLS: Final = 1_000
_INVALID_BODY: Final = "Body must be a single JSON-RPC request or notification object"


_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


def dumps(message: Any) -> bytes:
    return _ENCODER.encode(message).encode()


def status_of(code: int) -> int:
    return ERROR_CODE_HTTP_STATUS.get(code, 200)


def param_headers(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers that repeat the arguments of a call. If an annotation of the tool's schema
    is invalid, there are none. So it is if an argument has half a surrogate pair, which no header
    can have: a server that wants the header refuses the call, and does not run it.
    """
    if find_invalid_x_mcp_header(schema) is not None:
        return {}
    try:
        found = mcp_param_headers(x_mcp_header_map(schema), arguments)
    except UnicodeEncodeError:
        return {}
    return {name.lower(): value for name, value in found.items()}


class SdkModernRules:
    def __init__(
        self, upstream: SdkUpstream, declared: SchemaOf | None = None, *, eras: Eras = "both"
    ) -> None:
        self.handshake_versions: frozenset[str] = (
            HANDSHAKE_VERSIONS if eras != "2026" else frozenset()
        )
        self._is_spoken = eras != "2025"
        self._speaks_one = eras != "both"
        self._upstream = upstream
        self._declared = declared
        # Tool → its input schema, if that declares no header.
        self._plain: dict[str, Any] = {}

    async def check(
        self, http_request: HttpRequest, body: bytes
    ) -> tuple[Request, Peer] | Notification | ModernRefusal:
        """Check a body. A notification of a served version is returned for us to handle; the SDK
        acknowledges and drops it.
        """
        try:
            decoded = _decoded(body)
        except (ValueError, RecursionError):
            return _refused(None, error_body(PARSE_ERROR, "Parse error"))
        if isinstance(decoded, dict) and "id" not in decoded:
            notification = cast(dict[str, Any], decoded)
            error = self._of_another_era(notification.get("method"), None)
            if error is not None:
                return _refused(None, error, 400)
            return _notification(notification, http_request)
        try:
            request = JSONRPCRequest.model_validate(decoded)
        except ValidationError:
            return _refused(None, error_body(INVALID_REQUEST, _INVALID_BODY))
        error = None
        if self._speaks_one:
            error = self._of_another_era(request.method, request.params)
        if error is not None:
            # The status that hosts fall back from. Some fail at a 404.
            return _refused(request.id, error, 400)
        # Other headers decide nothing here, and there are more of them.
        raw = http_request.scope["headers"]
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in raw
            if name[:4] == b"mcp-"
        ]
        duplicated = find_duplicated_routing_header(headers)
        if duplicated is not None:
            text = f"{duplicated} header appears more than once"
            return _refused(request.id, error_body(HEADER_MISMATCH, text))
        # If several headers have one name, the first counts, as in a mapping of Starlette's.
        route = classify_inbound_request(cast(Any, decoded), headers=dict(reversed(headers)))
        if isinstance(route, InboundLadderRejection):
            return _rejected(request.id, route)
        upstream = self._upstream
        if self._declared is not None:
            rejection = self._mismatch(request, http_request, self._declared)
            if rejection is not None:
                return _rejected(request.id, rejection)
        elif not self._declares_nothing(request):
            rejection = await mcp_param_rejection(
                upstream.lowlevel, http_request, request, route, upstream.lifespan_state
            )
            if rejection is not None:
                return _rejected(request.id, rejection)
        return Request(request.id, request.method, request.params), client_of(route)

    def _mismatch(
        self, request: JSONRPCRequest, http_request: HttpRequest, declared: SchemaOf
    ) -> InboundLadderRejection | None:
        params = members_of(request.params)
        name: object = params.get("name")
        if request.method != method_names.CALL_TOOL or not isinstance(name, str):
            return None
        schema = declared(name)
        if schema is None:
            return None
        arguments = members_of(params.get("arguments"))
        return validate_mcp_param_headers(schema, arguments, http_request.headers)

    def _declares_nothing(self, request: JSONRPCRequest) -> bool:
        """Whether this is a call of a tool whose input schema declares no header. The SDK's rules
        then have nothing to compare, but would walk through the schema.
        """
        lookup = self._upstream.lowlevel.get_tool_input_schema
        name = (request.params or {}).get("name")
        if request.method != method_names.CALL_TOOL or lookup is None or not isinstance(name, str):
            return False
        try:
            schema = lookup(name)
            if schema is None:
                return False
            # A server that makes its schemas anew each time is checked each time.
            if self._plain.get(name) is not schema:
                if X_MCP_HEADER_KEY in json.dumps(schema):
                    return False
                if len(self._plain) >= _PLAIN_TOOLS:
                    self._plain.clear()
                self._plain[name] = schema
        except Exception:
            # This is the boundary to the server's code. The SDK asks again, logs the error, and
            # continues.
            return False
        return True

    def _of_another_era(self, method: object, params: Any) -> dict[str, Any] | None:
        """Return the error of a request of an era that the layer does not speak. None: it speaks
        that.

        All hosts begin with a handshake after "Method not found". Some do not after the error for a
        version, which the handshake era does not have.
        """
        if not self._is_spoken:
            return error_body(METHOD_NOT_FOUND, "Method not found", method)
        is_handshake = method == method_names.INITIALIZE and self._speaks_one
        if not is_handshake or PROTOCOL_VERSION_META in meta_of(params):
            return None
        requested = members_of(params).get("protocolVersion")
        refused = unsupported_protocol_version_rejection(str(requested))
        return error_body(refused.code, refused.message, refused.data) if refused else None

    def client(self, method: str, params: Any) -> Peer | tuple[int, str, Any]:
        error = self._of_another_era(method, params)
        if error is not None:
            return error["code"], error["message"], error.get("data")
        route = classify_inbound_request({"method": method, "params": params})
        if isinstance(route, InboundLadderRejection):
            return route.code, route.message, route.data
        return client_of(route)

    def header_mismatch(self, request_id: str | int) -> ModernRefusal:
        text = "Mcp-Session-Id does not match the session in _meta"
        return _refused(request_id, error_body(HEADER_MISMATCH, text))

    status_of = staticmethod(status_of)
    dumps = staticmethod(dumps)


def client_of(route: InboundModernRoute) -> Peer:
    described: dict[str, Any] = {"capabilities": route.client_capabilities}
    info: Mapping[str, Any] | None = route.client_info
    if isinstance(info, dict):
        described["clientInfo"] = info
    return Peer(route.protocol_version, described, modern=True)


def _decoded(body: bytes) -> Any:
    # The SDK reads fewer levels than `decode`: what is deeper is refused here, not in its middle.
    if len(body) < 2 * _LEVELS or body.count(b"[") + body.count(b"{") < _LEVELS:
        try:
            return decode(body)
        except ValueError:
            # The SDK reads more than JSON has: NaN, half a surrogate pair, UTF-16.
            return json.loads(body)
    return json.loads(body)


def _notification(
    decoded: dict[str, Any], http_request: HttpRequest
) -> Notification | ModernRefusal:
    try:
        notification = JSONRPCNotification.model_validate(decoded)
    except ValidationError:
        return _refused(None, error_body(INVALID_REQUEST, _INVALID_BODY))
    requested = http_request.headers.get(_VERSION_HEADER, "")
    unsupported = unsupported_protocol_version_rejection(requested)
    if unsupported is not None:
        return _rejected(None, unsupported)
    return Notification(notification.method, notification.params)


def _rejected(request_id: str | int | None, rejection: InboundLadderRejection) -> ModernRefusal:
    error = error_body(rejection.code, rejection.message, rejection.data)
    return _refused(request_id, error)


def _refused(
    request_id: str | int | None, error: dict[str, Any], status: int | None = None
) -> ModernRefusal:
    """Write an error as the SDK's modern entry does: an unknown id comes last, as null.

    Args:
        status: None: that of the error's code.
    """
    message: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id, "error": error}
    if request_id is None:
        message = {"jsonrpc": "2.0", "error": error, "id": None}
    return ModernRefusal(status or status_of(error["code"]), dumps(message))
