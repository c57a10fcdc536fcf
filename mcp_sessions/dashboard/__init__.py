"""A page on which an operator sees the sessions of a store, live: ``layer.dashboard()``, ``serve
--dashboard PATH`` and ``mcp-sessions dashboard``.
"""
