"""Connect to the wrapped server: the port to it, and the layer's additions around it."""
