"""Verify the credentials of clients, for servers that have no authentication of their own."""
