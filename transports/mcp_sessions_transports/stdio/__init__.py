"""stdio, both eras."""
