"""A wrapped server that is a URL: its sessions over Streamable HTTP, as children.

``wire`` sends the requests of one, and ``child`` carries messages between them and
``mcp_sessions.server.upstream.external``.
"""
