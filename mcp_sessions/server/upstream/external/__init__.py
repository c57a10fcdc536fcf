"""Run wrapped servers outside of this process: assign children to clients, and pass messages.

A child is a client's own instance of the server, such as a process that runs it (``stdio/``).
"""
