"""The resuming client: what happens between an application's MCP client and a network."""
