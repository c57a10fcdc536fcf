"""Store sessions: one contract (``contract.py``) and its implementations."""
