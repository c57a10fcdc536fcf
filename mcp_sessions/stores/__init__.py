"""Where sessions are remembered: one contract (``base``) and its implementations."""
