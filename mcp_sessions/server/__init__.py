"""Serve sessions: find a message's session, deliver events, run requests."""
