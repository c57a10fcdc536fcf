"""Which clause a step of a vector checks: the one that a server breaks if the step fails.

1. A step that names its ``clause`` checks that one.
2. Otherwise its expectation says it: an error by its code, a result by its members.
3. It checks what its vector is about as well: the clauses that the vector cites and that no
   expectation of its steps gives. If an error was expected and another one came, that is about the
   error alone.
4. A step without an expectation only leads to the others. If it fails, its method says whose clause
   that is.

A vector cites what its steps check by 1 and 2, so ``--only`` with a clause plays all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from mcp_sessions_conformance.values import SESSION, Json, as_object

Choice = tuple[str, ...]
"""Clauses of which a vector cites the one that is meant."""

_MALFORMED: Choice = ("ASC10", "RES13", "CRE3", "DEL2", "KEY15", "STT8", "HTP2", "TSK1")
_CONFLICT: Choice = ("SES11", "RES10", "HTL14")

_OF_CODE: dict[int, Choice] = {
    -32043: ("ERR1",),
    -31044: ("GAT2",),
    -31010: ("TKO5",),
    -31011: ("ERR6",),
    -31012: ("ERR7",),
    -32020: ("HTM11",),
    -32601: ("STA6", "SLS1", "WSS10"),
    -32602: _MALFORMED,
    -32700: ("WSS14", "STD3"),
}
_OF_REASON: dict[str, Choice] = {
    "mode_conflict": _CONFLICT,
    "key_reused": ("KEY8",),
    "duplicate_id": ("REQ2",),
    "invalid_state": ("STT8",),
    "draining": ("ERR15",),
    "no_stream": ("RES12",),
}
_OF_STATUS: dict[int, Choice] = {
    404: ("HTL13", "SEC3", "HTP2"),
    421: ("SEC9",),
    403: ("SEC9",),
    503: ("HTP6", "WSS17"),
}
_OF_NOTICE: dict[str, Choice] = {
    "taken_over": ("TKO3",),
    "evicted": ("TKO3",),
    "draining": ("TKO10",),
}
_OF_METHOD: dict[str, str] = {
    "session/start": "STA3",
    "session/resume": "RES4",
    "session/end": "END4",
    "sessions/create": "CRE1",
    "sessions/delete": "DEL3",
}
_EXPECTATIONS = frozenset(
    ("result", "error", "outcome", "notification", "request", "events", "status", "code", "json")
)
_LOOKS = frozenset(("collect", "silence", "ended", "check", "expect"))


def choices(step: Json) -> Iterator[Choice]:
    """What the expectations of a step are about; of each choice one clause is meant."""
    if "clause" in step:
        yield (step["clause"],)
        return
    body = as_object(step.get("json"))
    error = as_object(step.get("error")) or as_object(body.get("error"))
    error = error or as_object(as_object(step.get("refusal")).get("error"))
    yield from _of_error(error)
    yield from _of_result(step, as_object(step.get("result")))
    if isinstance(step.get("status"), int) and step["status"] in _OF_STATUS:
        yield _OF_STATUS[step["status"]]
    notice = as_object(step.get("notification"))
    if notice.get("method") == "notifications/sessions/detached":
        yield _OF_NOTICE.get(str(as_object(notice.get("params")).get("reason")), ("TKO3",))
    for member, clause in (("primed", "HTL12"), ("only_last_has_id", "HTL9"), ("numbered", "HTL4")):
        if member in step:
            yield (clause,)
    if "code" in step:
        yield ("WSS15",)
        if step["code"] == 1012:
            yield ("WSS17",)


def _of_error(error: Json) -> Iterator[Choice]:
    data = as_object(error.get("data"))
    reason = data.get("reason")
    if isinstance(reason, str) and reason in _OF_REASON:
        yield _OF_REASON[reason]
    elif isinstance(error.get("code"), int) and error["code"] in _OF_CODE:
        yield _OF_CODE[error["code"]]
    if "started" in data and error.get("code") == -32043:
        yield ("END6",)


def _of_result(step: Json, result: Json) -> Iterator[Choice]:
    if step.get("method") == "session/resume":
        if result.get("reason") == "no_stream":
            yield ("RES12",)
        elif "reason" in result and isinstance(result["reason"], str):
            yield ("CUP8",)
            if "catchup" in result:
                yield ("CUP5",)
        elif "catchup" in result:
            yield ("CUP3",) if result["catchup"] is True else ("CUP5", "CUP8")
        elif "replayed" in result:
            yield ("CUP3",)
    elif SESSION in as_object(result.get("_meta")):
        yield ("ASC12", "ASC14")


def checked(step: Json, cited: Sequence[str]) -> list[str]:
    """The clauses that a step checks by its expectation, of those that its vector cites."""
    found: list[str] = []
    for choice in choices(step):
        found += [clause for clause in choice if clause in cited] or choice[:1]
    if "status" in step and "error" in step and "HTP2" in cited:
        found.append("HTP2")
    if "ERR1" in found and "ERR2" in cited:
        found.append("ERR2")
    return list(dict.fromkeys(found))


def missing(steps: Iterable[Json], cited: Sequence[str]) -> list[Choice]:
    """The choices of which a vector cites nothing."""
    found = [choice for step in steps for choice in choices(step) if not set(choice) & set(cited)]
    return list(dict.fromkeys(found))


def blamed(
    step: Json, steps: Sequence[Json], cited: Sequence[str], *, is_other_error: bool = False
) -> list[str]:
    """The clauses of which a server breaks one if this step of these steps fails. None, if it only
    asks for another server: that is no clause's.

    Args:
        is_other_error: The step expected an error, and another one came.
    """
    if step["step"] == "beside":
        return []
    own = checked(step, cited)
    if "clause" in step or (own and is_other_error):
        return own
    has_expectation = step["step"] in _LOOKS or bool(_EXPECTATIONS & step.keys())
    method: Any = step.get("method")
    if not has_expectation and method in _OF_METHOD:
        return [_OF_METHOD[method]]
    if step["step"] in _LOOKS:
        # What a resume promised, the events after it keep.
        own += [clause for clause in ("CUP3", "CUP5") if clause in cited]
    others = {clause for each in steps for clause in checked(each, cited)}
    about = [clause for clause in cited if clause not in others]
    return list(dict.fromkeys(own + about)) or list(cited)
