"""The ways to be wrong that prove the vectors: see ``fault_proxy.py``.

Each is something that a real server gets wrong. ``broken.py`` says which vector each is caught
by; the tests of the runner play that table.
"""

from collections.abc import Mapping

from mcp_sessions_conformance.fault import Fault
from mcp_sessions_conformance.faults import (
    beside,
    bindings,
    calling,
    codes,
    events,
    hearing,
    narrow,
    requests,
    sessions,
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
        hearing,
        calling,
        narrow,
        beside,
    )
    for fault in file.FAULTS
}
"""By name."""
