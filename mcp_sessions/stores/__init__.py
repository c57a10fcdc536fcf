"""Store sessions: one contract (``base``) and its implementations."""
