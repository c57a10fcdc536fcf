"""Connect to the MCP SDK: the only package on the server's side that knows it.

``sdk_peer`` calls the SDK's handlers, ``sdk_modern_rules`` asks its rules for 2026-07-28 requests,
``http_application`` takes over the parts of the server's own HTTP application around its MCP
endpoint.
"""

from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, is_server

__all__ = ["SdkUpstream", "is_server"]
