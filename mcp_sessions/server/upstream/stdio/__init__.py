"""Run a wrapped server that is a command: child processes that speak MCP on their pipes.

``process`` runs it, and ``child`` carries messages between it and ``external/``.
"""
