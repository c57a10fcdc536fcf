"""``mcp_sessions.core.request_keys``: what must not run twice does not."""

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.request_keys import (
    Begun,
    KeyState,
    KeyUse,
    RequestKeys,
    content_digest,
)
from mcp_sessions.errors import InvalidParams
from mcp_sessions.ids import RequestKey

A, B, C = RequestKey("a"), RequestKey("b"), RequestKey("c")
DIGEST, OTHER_DIGEST = b"digest", b"other digest"
RESULT = b'"result":{}'
LIFETIME = 100.0


def keys(*, max_bytes: int = 10_000) -> RequestKeys:
    return RequestKeys(max_bytes=max_bytes, lifetime=LIFETIME)


def begin(
    known: RequestKeys, key: RequestKey, *, now: float = 0.0, digest: bytes = DIGEST
) -> Begun:
    return known.begin(KeyUse(key, digest, "process-1"), now=now)[0]


# --- rule 1: a key that is known is never begun again --------------------------------------


def test_a_key_is_first_once_then_running_then_answered() -> None:
    """KEY3."""
    known = keys()

    assert begin(known, A) is Begun.FIRST
    assert begin(known, A) is Begun.RUNNING
    assert known.finish(A, RESULT, now=1.0)
    begun, entry = known.begin(KeyUse(A, DIGEST, "process-2"), now=2.0)
    assert begun is Begun.ANSWERED
    assert entry is not None and (entry.outcome, entry.runner) == (RESULT, "process-1")


@pytest.mark.parametrize("finished", [False, True])
def test_the_same_key_with_other_content_is_refused(finished: bool) -> None:
    """KEY8: ``key_reused``, while it runs and after it."""
    known = keys()
    begin(known, A)
    if finished:
        known.finish(A, RESULT, now=0.0)

    assert begin(known, A, digest=OTHER_DIGEST) is Begun.OTHER_CONTENT
    assert begin(known, A) is (Begun.ANSWERED if finished else Begun.RUNNING)


def test_an_answer_that_cannot_be_known_leaves_its_key_behind() -> None:
    """KEY3: the caller receives ``OutcomeUnknown`` and nothing runs."""
    known = keys()
    begin(known, A)

    assert not known.finish(A, None, now=0.0)
    assert begin(known, A) is Begun.DROPPED


def test_the_first_outcome_stays() -> None:
    """An abort and the handler's own end may both report one."""
    known = keys()
    begin(known, A)

    assert known.finish(A, RESULT, now=0.0)
    assert not known.finish(A, b'"error":{}', now=0.0)
    entry = known.get(A)
    assert entry is not None and entry.outcome == RESULT


def test_an_outcome_of_an_unknown_key_is_not_kept() -> None:
    """It expired, or was never begun."""
    known = keys()

    assert not known.finish(A, RESULT, now=0.0)
    assert known.get(A) is None and len(known) == 0 and known.size == 0


def test_a_key_that_still_runs_outlives_the_lifetime() -> None:
    """KEY3: however long the handler takes, it does not run twice at once."""
    known = keys()
    begin(known, A)

    assert begin(known, A, now=100 * LIFETIME) is Begun.RUNNING


def test_an_answer_can_be_fetched_however_long_the_request_took() -> None:
    """REQ4, KEY3: a request that ran longer than a key lives, and was cut off at its end."""
    known = keys()
    begin(known, A)
    known.finish(A, RESULT, now=LIFETIME + 1)

    assert begin(known, A, now=LIFETIME + 2) is Begun.ANSWERED


# --- rule 2: bounded bytes and lifetime ----------------------------------------------------


def test_the_oldest_answers_go_first_and_leave_their_keys() -> None:
    """Rule 2."""
    known = keys(max_bytes=3 * 97 + 2 * 50)
    for key in (A, B, C):
        begin(known, key)
        known.finish(key, b"x" * 50, now=0.0)

    assert [begin(known, key) for key in (A, B, C)] == [
        Begun.DROPPED,
        Begun.ANSWERED,
        Begun.ANSWERED,
    ]


def test_when_bare_keys_fill_the_space_a_new_key_is_refused_and_no_known_one_forgotten() -> None:
    """Rule 2: refusing is safe, forgetting runs something twice."""
    known = keys(max_bytes=2 * 97)
    begin(known, A)
    begin(known, B)

    begun, entry = known.begin(KeyUse(C, DIGEST, "process-1"), now=0.0)

    assert begun is Begun.FULL and entry is None
    assert known.get(C) is None
    assert begin(known, A) is Begun.RUNNING and begin(known, B) is Begun.RUNNING


def test_a_key_is_refused_if_one_byte_is_missing_and_no_answer_is_there_to_go() -> None:
    known = keys(max_bytes=2 * 97 - 1)
    assert begin(known, A) is Begun.FIRST
    assert begin(known, B) is Begun.FULL


def test_a_running_request_keeps_its_key_when_answers_are_dropped() -> None:
    """Rule 2 drops answers only."""
    known = keys(max_bytes=3 * 97 + 10)
    begin(known, A)
    begin(known, B)
    known.finish(B, b"x" * 100, now=0.0)

    assert begin(known, C) is Begun.FIRST
    assert begin(known, A) is Begun.RUNNING


def test_an_answer_that_never_fits_costs_no_other_answer() -> None:
    """One result over ``request_key_bytes`` must not lose the session all its others."""
    known = keys(max_bytes=1_000)
    begin(known, A)
    known.finish(A, RESULT, now=0.0)
    begin(known, B)

    assert not known.finish(B, b"x" * 1_000, now=0.0)
    assert begin(known, B) is Begun.DROPPED
    assert begin(known, A) is Begun.ANSWERED


def test_a_session_that_is_full_is_as_quick_as_one_that_is_not() -> None:
    """Once the oldest answers go for each new one, those that went before cost nothing: a call
    runs as many lines after a thousand calls as after a hundred.
    """
    known, answer = keys(max_bytes=300_000), b"x" * 2_000

    def call(number: int) -> None:
        key = RequestKey(f"key-{number:04}")
        assert begin(known, key) is Begun.FIRST
        assert known.finish(key, answer, now=0.0)

    spent = [_lines_run(lambda number=number: call(number)) for number in range(1_200)]
    assert begin(known, RequestKey("key-1000")) is Begun.DROPPED
    assert max(spent[1_100:]) <= 2 * max(spent[200:300])


def _lines_run(what: Callable[[], None]) -> int:
    lines = 0

    def count(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        what()
    finally:
        sys.settrace(before)
    return lines


def test_a_key_that_is_refused_costs_no_answer() -> None:
    """``FULL``: "nothing was recorded", and nothing is lost."""
    known = keys(max_bytes=97 + len(RESULT))
    begin(known, A)
    known.finish(A, RESULT, now=0.0)

    assert begin(known, B) is Begun.FULL
    assert begin(known, A) is Begun.ANSWERED


def test_a_key_is_forgotten_after_its_lifetime_and_not_before() -> None:
    """KEY16: a client never re-sends an older one."""
    known = keys()
    begin(known, A)
    known.finish(A, RESULT, now=0.0)

    assert begin(known, A, now=LIFETIME) is Begun.ANSWERED
    begin(known, B, now=LIFETIME + 1)
    assert known.get(A) is None and len(known) == 1


def test_a_long_request_does_not_keep_the_younger_keys_alive() -> None:
    """Rule 2: one request that runs for a day must not fill the table behind it."""
    known = keys()
    begin(known, A)
    begin(known, B, now=1.0)
    known.finish(B, RESULT, now=1.0)

    begin(known, C, now=10 * LIFETIME)

    assert known.get(B) is None and known.get(A) is not None


KEYS = st.sampled_from([RequestKey(f"key-{number}") for number in range(6)])
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "finish", "unknown", "wait"]), KEYS, st.integers(0, 400)
    ),
    max_size=60,
)


@given(STEPS, st.integers(1, 1_000))
def test_no_key_is_begun_twice_and_no_bound_exceeded(
    steps: Sequence[tuple[str, RequestKey, int]], max_bytes: int
) -> None:
    """Rules 1 and 2, for every sequence of requests, ends and waits."""
    known, now = keys(max_bytes=max_bytes), 0.0
    begun_at: dict[RequestKey, float] = {}
    running: set[RequestKey] = set()
    outcomes: dict[RequestKey, bytes] = {}
    for step, key, amount in steps:
        match step:
            case "begin":
                begun, entry = known.begin(KeyUse(key, DIGEST, "process-1"), now=now)
                young = key in begun_at and begun_at[key] >= now - LIFETIME
                if begun is Begun.FIRST:
                    assert not young and key not in running
                    begun_at[key] = now
                    running.add(key)
                elif begun is Begun.FULL:
                    assert not young and key not in running and entry is None
                else:
                    assert key in begun_at
                    assert (begun is Begun.RUNNING) == (key in running)
                if begun is Begun.ANSWERED:
                    assert entry is not None and entry.outcome == outcomes[key]
            case "finish" | "unknown":
                outcome = b"x" * amount if step == "finish" else None
                if known.finish(key, outcome, now=now):
                    assert outcome is not None and key in running
                    outcomes[key] = outcome
                running.discard(key)
            case _:
                now += amount / 4
        assert 0 <= known.size <= max_bytes
    if not running:
        begin(known, A, now=now + 2 * LIFETIME)
        assert len(known) <= 1


@given(st.lists(st.tuples(KEYS, st.integers(0, 200)), max_size=30))
def test_when_all_is_forgotten_no_byte_is_accounted_for(
    requests: Sequence[tuple[RequestKey, int]],
) -> None:
    """A15's cousin: the account is evicted with what it accounts for."""
    known = keys(max_bytes=1_000)
    for key, length in requests:
        begin(known, key)
        known.finish(key, b"x" * length, now=0.0)

    assert not known.finish(A, RESULT, now=2 * LIFETIME)
    assert (len(known), known.size) == (0, 0)


def test_every_state_of_a_key_is_something_that_begin_can_say() -> None:
    """``begin`` answers with the state of a known entry by its value."""
    assert {state.value for state in KeyState} < {begun.value for begun in Begun}


# --- what makes two requests the same ------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5)
PARAMS = st.dictionaries(
    st.text(max_size=5),
    st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    max_size=4,
)


@given(PARAMS, PARAMS, PARAMS)
def test_a_request_sent_again_is_the_same_whatever_its_meta(
    params: dict[str, Any], meta: dict[str, Any], other_meta: dict[str, Any]
) -> None:
    """KEY8: progress token and ``state`` differ when a request is sent again."""
    again = dict(reversed(params.items()))

    assert content_digest("tools/call", {**params, "_meta": meta}) == content_digest(
        "tools/call", {"_meta": other_meta, **again} | {"_meta": other_meta}
    )


@given(PARAMS, PARAMS)
def test_other_params_or_another_method_are_other_content(
    a: dict[str, Any], b: dict[str, Any]
) -> None:
    """KEY8: ``key_reused``."""
    a.pop("_meta", None)
    b.pop("_meta", None)
    same = repr(sorted(a.items())) == repr(sorted(b.items()))

    assert (content_digest("m", a) == content_digest("m", b)) == same
    assert content_digest("m", a) != content_digest("n", a)


def test_no_params_and_empty_params_are_the_same_content() -> None:
    """The wire knows both spellings of nothing."""
    assert content_digest("ping", None) == content_digest("ping", {})
    assert content_digest("ping", {"_meta": {}}) == content_digest("ping", None)


def test_method_and_params_cannot_be_shifted_into_each_other() -> None:
    """They are encoded as two values."""
    assert content_digest('m",{}', None) != content_digest("m", {",{}": {}})


@pytest.mark.parametrize("levels", [300, 1_000])
def test_whatever_could_be_read_from_the_wire_has_a_digest_or_a_clear_error(levels: int) -> None:
    """A caller chooses its params; no choice of them is an exception of ours."""
    nested: Any = "x"
    for _ in range(levels):
        nested = [nested]
    try:
        digest = content_digest("tools/call", {"arguments": nested})
    except InvalidParams as refused:
        assert levels > 300
        assert "nested too deeply" in str(refused)
    else:
        assert digest == content_digest("tools/call", {"arguments": nested})


@pytest.mark.parametrize("value", [2**64, -(2**70), "\ud800"])
def test_what_only_a_modern_era_client_can_send_has_a_digest(value: object) -> None:
    """The SDK's own parser reads integers over 64 bits and lone surrogates."""
    digest = content_digest("tools/call", {"b": value, "a": 1})

    assert digest == content_digest("tools/call", {"a": 1, "b": value, "_meta": {"x": value}})
    assert digest != content_digest("tools/call", {"a": 1, "b": None})
