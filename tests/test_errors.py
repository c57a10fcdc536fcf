"""``mcp_sessions.errors``: one tree, drawn in its docstring, that says nothing secret."""

import inspect
import re

import pytest

from mcp_sessions import errors
from mcp_sessions.errors import (
    ConfigurationError,
    DataConflict,
    Detached,
    InvalidParams,
    InvalidReason,
    InvalidRequest,
    InvalidState,
    LimitReached,
    OutcomeUnknown,
    Refusal,
    SessionDetached,
    SessionNotFound,
    SessionRequired,
    SessionRequiredByServer,
    SessionsError,
    StateTooLarge,
    Status,
    StoreUnavailable,
    WireError,
)

SECRET = "cE_n9zSecretSessionId-0123456789abcdefghijk"

WIRE_ERRORS = [
    SessionNotFound(SECRET),
    SessionRequiredByServer(),
    SessionDetached(),
    LimitReached("max_sessions", 9),
    OutcomeUnknown({"requestKey": SECRET}),
    InvalidParams("params.sessionId must be a string"),
    InvalidRequest(InvalidReason.MODE_CONFLICT, "the session belongs to its transport"),
]


def classes() -> dict[str, type[BaseException]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value)
        and issubclass(value, BaseException)
        and value.__module__ == errors.__name__
    }


def drawn() -> tuple[dict[str, str], dict[str, int]]:
    """The docstring's tree: class → its parent, and wire error → its code."""
    parents: dict[str, str] = {}
    codes: dict[str, int] = {}
    above = {0: "SessionsError"}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ((?:│   |    )*)[├└]── (\w+)\s+(-\d{5})?", line)
        if match:
            depth = len(match[1]) // 4 + 1
            parents[match[2]] = above[depth - 1]
            above[depth] = match[2]
            if match[3]:
                codes[match[2]] = int(match[3])
    return parents, codes


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    """Style: one tree, in one file, drawn in its docstring."""
    parents, _ = drawn()
    real = {
        name: value.__bases__[0].__name__
        for name, value in classes().items()
        if value is not SessionsError
    }

    assert parents == real


def test_the_codes_in_the_docstring_are_the_codes_on_the_wire() -> None:
    """ERR1, ERR2, ERR6, ERR7."""
    _, codes = drawn()
    real = {
        name: value.code
        for name, value in classes().items()
        if issubclass(value, WireError) and value is not WireError
    }

    assert codes == real
    assert {
        "SessionNotFound": -32043,
        "SessionRequiredByServer": -31044,
        "SessionDetached": -31010,
        "LimitReached": -31011,
        "OutcomeUnknown": -31012,
        "InvalidParams": -32602,
        "InvalidRequest": -32600,
    }.items() <= real.items()


@pytest.mark.parametrize(
    ("spelled", "reasons"),
    [
        (
            "no_position evicted expired unknown_position ahead log_replaced no_stream",
            [reason.value for reason in Refusal],
        ),
        ("mode_conflict key_reused duplicate_id", [reason.value for reason in InvalidReason]),
    ],
)
def test_reasons_are_spelled_as_the_protocol_spells_them(spelled: str, reasons: list[str]) -> None:
    """CUP5: distinct, and exactly these."""
    assert reasons == spelled.split()


def test_a_displaced_client_is_notified_a_reason_of_the_protocol() -> None:
    """TKO7, WSS17."""
    assert {"taken_over", "draining"} <= {reason.value for reason in Detached}


def test_an_unknown_session_is_answered_with_what_the_caller_sent() -> None:
    """ERR1, HTP2: ``data.sessionId`` = what the caller sent; HTTP 200, or 404 by choice."""
    assert SessionNotFound("x").data == {"sessionId": "x"}
    assert SessionNotFound("x").status == 200
    assert SessionNotFound("x", status=Status.NOT_FOUND).status == 404


def test_a_refusal_names_its_limit_or_reason_in_data() -> None:
    """ERR6, ASC10: ``data.limit`` and how large it is, ``data.reason``."""
    assert LimitReached("max_sessions", 9).data == {"limit": "max_sessions", "max": 9}
    later = {"limit": "max_calls_per_principal", "max": 9, "retryAfter": 3}
    assert LimitReached("max_calls_per_principal", 9, 2.1).data == later
    assert InvalidRequest(InvalidReason.KEY_REUSED, "…").data == {"reason": "key_reused"}
    assert InvalidParams("…").data is None
    assert InvalidParams("…", reason="invalid_state").data == {"reason": "invalid_state"}


def test_a_state_that_is_refused_says_the_same_whatever_the_cause() -> None:
    """STT8: ``-32602``, ``invalid_state``, one text; the cause is for the log."""
    refused = [InvalidState(cause) for cause in ("forged", "expired", "of another session")]

    assert len({(error.code, error.message, str(error.data)) for error in refused}) == 1
    assert refused[0].data == {"reason": "invalid_state"}
    assert [error.cause for error in refused] == ["forged", "expired", "of another session"]


@pytest.mark.parametrize("error", WIRE_ERRORS, ids=lambda error: type(error).__name__)
def test_a_wire_error_says_its_message_and_no_secret(error: WireError) -> None:
    """SEC2: the sentence is safe in a log; the evidence is in attributes. A handler that reaches a
    limit reads which one, and how large it is.
    """
    limit = ": max_sessions is 9" if isinstance(error, LimitReached) else ""
    assert str(error) == error.message + limit
    assert SECRET not in str(error)


def test_the_repr_of_a_wire_error_is_as_safe_in_a_log_as_its_sentence() -> None:
    """SEC2: ``%r`` and error trackers print ``args``."""
    assert not [error for error in WIRE_ERRORS if SECRET in repr(error)]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SessionRequired(), "belongs to no session"),
        (DataConflict(), "repeat the edit"),
        (StateTooLarge(5_000, 4_096), "5000 characters of at most 4096"),
        (StoreUnavailable("redis is away"), "redis is away"),
        (ConfigurationError("no such store"), "no such store"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_says_in_one_sentence_what_is_wrong(error: SessionsError, says: str) -> None:
    """Style: the sentence in ``__str__``."""
    assert says in str(error)
