"""The ways to be wrong that prove the vectors: see ``saboteur.py``.

Each is something that a real server gets wrong. ``broken.py`` says which vector each is caught
by; the tests of the runner play that table.
"""

from collections.abc import Mapping

from mcp_sessions_conformance.faults import bindings, common, events, requests, sessions, state
from mcp_sessions_conformance.saboteur import Fault

FILES = (sessions, events, state, requests, bindings)
"""Each adds its faults when it is loaded."""

FAULTS: Mapping[str, Fault] = common.FAULTS
"""By name."""
