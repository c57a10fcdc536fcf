"""The wrapped server: the port to it, and what the layer puts around it."""
