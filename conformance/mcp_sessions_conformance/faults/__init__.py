"""The ways to be wrong that prove the vectors: see ``fault_proxy.py``.

Each is something that a real server gets wrong. ``broken.py`` says which vector each is caught
by; the tests of the runner play that table.
"""

from collections.abc import Mapping

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.faults import (
    bindings,
    boundaries,
    calling,
    codes,
    delivering,
    events,
    narrow,
    requests,
    sessions,
    shutdown,
    state_faults,
)

FAULTS: Mapping[str, Fault] = {
    fault.name: fault
    for file in (
        sessions,
        events,
        state_faults,
        requests,
        bindings,
        codes,
        delivering,
        calling,
        narrow,
        boundaries,
        shutdown,
    )
    for fault in file.FAULTS
}
"""By name."""
