"""Run wrapped servers outside of this process: assign children to clients, and pass messages.

A child is a client's own instance of the server, a process that runs it (``command.py``),
or a session at a URL (``url.py``).
"""
