"""Streamable HTTP, both eras: the server's side and the client's."""
