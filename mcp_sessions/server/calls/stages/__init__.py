"""Apply features to a request before the wrapped server gets it, and to its answer after."""
