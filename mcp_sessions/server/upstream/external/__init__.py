"""A wrapped server outside of this process: whose its children are, and what passes.

A child is one of its own to the server: a process that runs it (``stdio/``).
"""
