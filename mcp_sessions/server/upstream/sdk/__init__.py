"""Connect to the MCP SDK: the one place on the server's side that knows it.

``kernel`` calls the SDK's handler kernel, ``modern`` asks its rules for 2026-07-28 requests,
``http`` takes over the parts of the server's own HTTP application around its MCP endpoint. Only
these three files use private or provisional parts of the SDK.
"""

from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, is_server

__all__ = ["SdkUpstream", "is_server"]
