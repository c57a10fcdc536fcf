"""A connection and what comes on it, and the port that every transport implements for it."""
