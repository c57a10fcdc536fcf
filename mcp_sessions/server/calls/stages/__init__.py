"""What features do to a request before the wrapped server has it, and to its answer after."""
