"""The command ``mcp-sessions``: one file per sub-command, and what they share."""
