"""A wrapped server that is a command: child processes that speak MCP on their pipes.

``configuration`` says which command, ``process`` runs it, ``child`` speaks JSON-RPC with it,
``children`` knows whose it is, and ``upstream`` is the port to all of them.
"""
