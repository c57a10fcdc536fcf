"""The wrapped server: the one place on the server's side that knows the MCP SDK.

``kernel`` calls the SDK's handler kernel, ``modern`` asks its rules for 2026-07-28 requests,
``http`` takes over what the server's own HTTP application has around its MCP endpoint.
Whatever of the SDK is private or provisional is touched in these three files only.
"""

from mcp_sessions.server.upstream.sdk.kernel import SdkUpstream, is_server

__all__ = ["SdkUpstream", "is_server"]
