"""Report what happens: the audit, limits that refused, and the names that a log may have."""
