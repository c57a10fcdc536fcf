"""The client half of Streamable HTTP, both eras."""
