"""Implement the command ``mcp-sessions``: one file for each sub-command, and their common parts."""
