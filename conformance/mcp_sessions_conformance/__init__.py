"""Plays the conformance vectors against a server, and a scripted server against a client.

It stands outside: it imports nothing of what it tests, and has its own HTTP, SSE, WebSocket and
pipe code. Its expectations are in ``vectors/``, which authors in any language can read.
"""
