from mcp_sessions_conformance.fault import Case, Fault, Rewritten
from mcp_sessions_conformance.faults.shared_faults import in_results, one_principal, params_of
from mcp_sessions_conformance.values import Json, as_object

HANDLE = "session"


def _knows_no_handles(case: Case) -> Rewritten:
    given = as_object(params_of(case.message).get("arguments"))
    return [case.message] if given.pop(HANDLE, None) is not None else None


def _notifies_again(result: Json, case: Case) -> None:
    given = case.asked is not None and as_object(params_of(case.asked).get("arguments"))
    if given and given.get(HANDLE):
        result["structuredContent"] = {HANDLE: given[HANDLE]}


def _asks_for_it(result: Json, case: Case) -> None:
    for tool in result["tools"]:
        if HANDLE in as_object(tool["inputSchema"].get("properties")):
            tool["inputSchema"]["required"] = [HANDLE]


def _begins_with_any(case: Case) -> Rewritten:
    # One that nobody made begins a session: so does a call without.
    given = as_object(params_of(case.message).get("arguments"))
    if not isinstance(given.get(HANDLE), str) or len(given[HANDLE]) == 32:
        return None
    del given[HANDLE]
    return [case.message]


CAUGHT_BY: tuple[tuple[Fault, str], ...] = (
    (
        Fault("knows-no-handles", "looks at no handle", to_server=_knows_no_handles),
        "a-handle-finds-the-session-that-it-was-said-for",
    ),
    (
        Fault(
            "says-handles-again",
            "says a handle to who passed it",
            to_client=in_results(("tools/call",), _notifies_again),
        ),
        "a-handle-finds-the-session-that-it-was-said-for",
    ),
    (
        Fault(
            "asks-for-handles",
            "lists the argument as one that is required",
            to_client=in_results(("tools/list",), _asks_for_it),
        ),
        "a-handle-finds-the-session-that-it-was-said-for",
    ),
    (
        Fault("begins-with-any", "starts a session for any handle", to_server=_begins_with_any),
        "what-is-no-handle-starts-nothing",
    ),
    (
        Fault("handles-are-credentials", "asks nobody who passes one", http=one_principal),
        "a-handle-is-worth-nothing-to-others",
    ),
)
"""Fault, and the id of a vector that fails because of it."""
