"""``SessionSecurity``: the token of a session's state, made and refused.

STT8 is owned here: the sender of any wrong token gets the same answer.
"""

from __future__ import annotations

import base64
import json
import logging
import random
import string
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions import sealing
from mcp_sessions.errors import InvalidState, StateTooLarge
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import SessionSecurity
from tests.security.tokens import (
    ALICE,
    AUDIENCE,
    EXPIRES,
    MADE,
    NEW,
    NOW,
    OLD,
    OTHER,
    SESSION,
    STATE,
    face,
    flipped,
    opened,
    refusal,
    sealed,
    server,
)

FORMS = pytest.mark.parametrize("sign_only", [False, True], ids=["sealed", "signed"])

KEYS = st.text(max_size=3)
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(KEYS, values, max_size=3),
    max_leaves=8,
)
STATES = st.dictionaries(KEYS, JSON_VALUES, max_size=4)

BASE64URL = string.ascii_letters + string.digits + "-_"

REFUSED = face(InvalidState("any cause"))


def json_of(value: object) -> str:
    """Tells apart what ``==`` does not: 1, 1.0 and True."""
    return json.dumps(value, sort_keys=True)


# --- what is sealed comes back -----------------------------------------------------------


@given(state=STATES, version=st.integers(0, 2**63))
def test_what_was_sealed_is_opened(state: dict[str, Any], version: int) -> None:
    """STT1: the client echoes it, the server has its mapping again."""
    for security in (server(), server(sign_only=True)):
        value, back = opened(security, sealed(security, state, version=version))

        assert (json_of(value), back) == (json_of(state), version)


@given(state=STATES, seed=st.integers(0, 99))
def test_equal_state_has_an_equal_token_on_every_replica(state: dict[str, Any], seed: int) -> None:
    """STT11: minted anew only when the state changed, and nobody stores the token."""
    items = list(state.items())
    random.Random(seed).shuffle(items)

    for sign_only in (False, True):
        here = sealed(server(sign_only=sign_only), state)
        there = sealed(server(sign_only=sign_only), dict(items))
        assert here == there


@FORMS
def test_whatever_changes_changes_the_token(sign_only: bool) -> None:
    """The other half of it: an equal token means that nothing changed."""
    security = server(sign_only=sign_only)
    tokens = [
        sealed(security),
        sealed(security, {**STATE, "lang": "de"}),
        sealed(security, {}),
        sealed(security, version=4),
        sealed(security, expires_at=EXPIRES + 1),
        sealed(security, session_id="another"),
        sealed(security, principal=ANONYMOUS),
        sealed(server(sign_only=sign_only, audience="calendar")),
        sealed(server(OLD, sign_only=sign_only)),
    ]

    assert len(set(tokens)) == len(tokens)


@FORMS
def test_a_token_is_visible_ascii_that_needs_no_escaping(sign_only: bool) -> None:
    """The data-layer document: a string in JSON, and perhaps in a header."""
    token = sealed(server(sign_only=sign_only))

    assert set(token) <= set(BASE64URL + ".")


def test_a_sealed_token_cannot_be_read_and_a_signed_one_can() -> None:
    """STT5: sealed or, by choice, signed and readable."""
    state = {"note": "do not tell"}
    _, body, _ = sealed(server(sign_only=True), state).split(".")
    _, box = sealed(server(), state).split(".")

    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    assert claims == {"expires_at": EXPIRES, "state": state, "version": 3}
    assert b"tell" not in base64.urlsafe_b64decode(box + "==")


@FORMS
def test_a_refreshed_credential_of_the_owner_opens_the_token(sign_only: bool) -> None:
    """SES8: scopes are no part of who somebody is."""
    security = server(sign_only=sign_only)
    refreshed = replace(ALICE, scopes=frozenset({"read", "write"}))

    assert opened(security, sealed(security), principal=refreshed) == (STATE, 3)


@FORMS
def test_a_token_is_good_until_the_moment_that_it_expires(sign_only: bool) -> None:
    """STT8."""
    security = server(sign_only=sign_only)
    token = sealed(security)

    assert opened(security, token, now=EXPIRES - 0.001) == (STATE, 3)
    assert refusal(security, token, now=EXPIRES).cause == "expired"


@FORMS
def test_a_rotation_in_three_steps_refuses_nobody(sign_only: bool) -> None:
    """STT8: the old key opens until it is dropped. Each step may have reached one replica only."""
    steps = [server(*keys, sign_only=sign_only) for keys in ([OLD], [OLD, NEW], [NEW, OLD], [NEW])]
    tokens = [sealed(step) for step in steps]

    for before, after in ((0, 1), (1, 2), (2, 3)):
        assert opened(steps[after], tokens[before]) == (STATE, 3)
        assert opened(steps[before], tokens[after]) == (STATE, 3)
    # The first key seals, so a step that does not change it changes no token.
    assert tokens[0] == tokens[1] != tokens[2] == tokens[3]
    assert face(refusal(steps[3], tokens[1])) == REFUSED


# --- STT8: all that is refused, and the one answer ------------------------------------------


@dataclass(frozen=True)
class Wrong:
    cause: str
    """What the log says, or the beginning of it."""

    token: Callable[[bool], str] = lambda sign_only: sealed(server(sign_only=sign_only))
    """Sent; by default Alice's genuine token."""

    server: Callable[[bool], SessionSecurity] = lambda sign_only: server(sign_only=sign_only)
    """Where to; by default to where it comes from."""

    session_id: str = SESSION
    principal: Principal = ALICE
    now: float = NOW


def changed(change: Callable[[str], str]) -> Callable[[bool], str]:
    return lambda sign_only: change(sealed(server(sign_only=sign_only)))


def of_a_session_id(sign_only: bool) -> str:
    return server(sign_only=sign_only).seal_session_id(
        principal=ALICE, created_at=MADE, expires_at=EXPIRES
    )


def in_the_other_form(sign_only: bool) -> str:
    return sealed(server(sign_only=not sign_only))


def in_the_other_form_under_this_prefix(sign_only: bool) -> str:
    _, _, rest = in_the_other_form(sign_only).partition(".")
    return (sealing.SIGNED if sign_only else sealing.SEALED) + rest


NOT_GENUINE = "changed, or made for another"

SEALED_ONLY = {
    "wrong key": Wrong("sealed with a key that is not in", server=lambda _: server(OTHER)),
    "dropped key": Wrong(
        "sealed with a key that is not in", token=lambda _: sealed(server(OLD, NEW))
    ),
    "signed": Wrong("not a sealed token", token=in_the_other_form),
    "signed, called sealed": Wrong("not canonical", token=in_the_other_form_under_this_prefix),
}
SIGNED_ONLY = {
    "wrong key": Wrong("signed with a key", server=lambda _: server(OTHER, sign_only=True)),
    "dropped key": Wrong(
        "signed with a key", token=lambda _: sealed(server(OLD, NEW, sign_only=True))
    ),
    "sealed": Wrong("not a signed token", token=in_the_other_form),
    "sealed, called signed": Wrong("too short", token=in_the_other_form_under_this_prefix),
    "no signature": Wrong("too short", token=changed(lambda token: token.rpartition(".")[0])),
    "no payload": Wrong(
        "signed with a key", token=changed(lambda token: "v1s.." + token.rpartition(".")[2])
    ),
    "two signatures": Wrong(
        "not canonical", token=changed(lambda token: token + "." + token.rpartition(".")[2])
    ),
}
BOTH = {
    "another audience": Wrong(
        NOT_GENUINE, server=lambda form: server(sign_only=form, audience="mail")
    ),
    "no audience": Wrong(NOT_GENUINE, server=lambda form: server(sign_only=form, audience=None)),
    "another client": Wrong(NOT_GENUINE, principal=replace(ALICE, client_id="other")),
    "another issuer": Wrong(NOT_GENUINE, principal=replace(ALICE, issuer="https://other.example")),
    "another subject": Wrong(NOT_GENUINE, principal=replace(ALICE, subject="bob")),
    "no subject": Wrong(NOT_GENUINE, principal=replace(ALICE, subject=None)),
    "nobody": Wrong(NOT_GENUINE, principal=ANONYMOUS),
    "another session": Wrong(NOT_GENUINE, session_id="gH7-AnotherSessionId-9876543210zyxwvutsrqpo"),
    "another purpose": Wrong(NOT_GENUINE, token=of_a_session_id),
    "expired": Wrong("expired", now=EXPIRES),
    "long expired": Wrong("expired", now=EXPIRES * 1_000),
    "a clock that is broken": Wrong("expired", now=float("nan")),
    "empty": Wrong("not a", token=lambda _: ""),
    "a prefix and no more": Wrong(
        "too short", token=changed(lambda token: token.partition(".")[0] + ".")
    ),
    "no prefix": Wrong("not a", token=changed(lambda token: token.partition(".")[2])),
    "a later version": Wrong("not a", token=changed(lambda token: "v2" + token[2:])),
    "not base64": Wrong("not canonical", token=changed(lambda token: token[:9] + "%" + token[10:])),
    "the other base64": Wrong(
        "not canonical", token=changed(lambda token: token[:9] + "+" + token[10:])
    ),
    "padded": Wrong("not canonical", token=changed(lambda token: token + "=")),
    "white space within": Wrong(
        "not canonical", token=changed(lambda token: token[:9] + "\n" + token[9:])
    ),
    "white space around": Wrong("not canonical", token=changed(lambda token: token + " ")),
    "white space before": Wrong("not a", token=changed(lambda token: " " + token)),
    "a line break after": Wrong("not canonical", token=changed(lambda token: token + "\n")),
    "not ASCII": Wrong("not canonical", token=changed(lambda token: token[:9] + "é" + token[10:])),
    "digits of another script": Wrong(
        "not canonical", token=changed(lambda token: token[:9] + "٣" + token[10:])
    ),
    "half a character": Wrong(
        "not canonical", token=changed(lambda token: token[:9] + "\ud83d" + token[10:])
    ),
    "a zero byte": Wrong("not canonical", token=changed(lambda token: token + "\0")),
    "a megabyte": Wrong("larger than max_token", token=changed(lambda token: token + "A" * 2**20)),
    "a megabyte of nonsense": Wrong("larger than max_token", token=lambda _: "é" * 2**20),
}
CASES = [
    pytest.param(wrong, sign_only, id=f"{form}: {name}")
    for form, sign_only, some in (("sealed", False, SEALED_ONLY), ("signed", True, SIGNED_ONLY))
    for name, wrong in {**some, **BOTH}.items()
]


@pytest.mark.parametrize(("wrong", "sign_only"), CASES)
def test_each_cause_gets_the_one_answer_and_its_own_line_in_the_log(
    wrong: Wrong, sign_only: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """STT8, SEC2."""
    token = wrong.token(sign_only)
    caplog.set_level(logging.DEBUG)

    error = refusal(
        wrong.server(sign_only),
        token,
        session_id=wrong.session_id,
        principal=wrong.principal,
        now=wrong.now,
    )

    assert face(error) == REFUSED
    assert wrong.cause in error.cause
    [record] = caplog.records
    line = record.getMessage()
    assert (record.name, record.levelname) == ("mcp_sessions.security", "WARNING")
    assert line.endswith(f"refused: {error.cause}")
    for secret in (token, token[4:40], NEW, OLD, OTHER, wrong.session_id, "alice", "lang"):
        assert not secret or secret not in line


def test_a_flood_of_wrong_tokens_is_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    security = server()
    for second in range(121):
        with pytest.raises(InvalidState):
            opened(security, "junk", now=NOW + second)
    assert len(caplog.records) == 3


def test_the_answer_is_the_one_of_the_protocol() -> None:
    """STT8: ``-32602``, ``data.reason = "invalid_state"``."""
    error = refusal(server(), "")

    assert (error.code, error.data, error.status) == (-32602, {"reason": "invalid_state"}, 200)


@FORMS
def test_every_bit_of_a_token_matters(sign_only: bool) -> None:
    """STT8: bit flips."""
    security = server(sign_only=sign_only)
    for token in flipped(sealed(security)):
        assert face(refusal(security, token)) == REFUSED


@FORMS
@pytest.mark.parametrize("version", [1, 10, 100])
def test_a_token_has_one_spelling(sign_only: bool, version: int) -> None:
    """No second text for the same bytes. Three lengths: one character may have bits to spare."""
    security = server(sign_only=sign_only)
    token = sealed(security, version=version)
    ends = [len(token) - 1]
    if sign_only:
        ends.append(token.rindex(".") - 1)

    for position in ends:
        for other in set(BASE64URL) - {token[position]}:
            spelling = token[:position] + other + token[position + 1 :]
            assert face(refusal(security, spelling)) == REFUSED


@FORMS
def test_no_part_of_a_token_is_a_token(sign_only: bool) -> None:
    """STT8: truncated, at every length and from either end."""
    security = server(sign_only=sign_only)
    token = sealed(security)
    for length in range(1, len(token) + 1):
        assert face(refusal(security, token[:-length])) == REFUSED
        assert face(refusal(security, token[length:])) == REFUSED


@FORMS
@given(nonsense=st.text(), prefix=st.sampled_from(["", sealing.SEALED, sealing.SIGNED]))
def test_nonsense_gets_the_one_answer_too(sign_only: bool, nonsense: str, prefix: str) -> None:
    """STT8: accepted, or refused with the documented error, and nothing else."""
    assert face(refusal(server(sign_only=sign_only), prefix + nonsense)) == REFUSED


def test_a_key_that_is_unknown_costs_the_work_of_a_known_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """ERR2, STT8: the time of a refusal does not tell which keys a server has."""
    decryptions: list[bytes] = []

    class Counting:
        def __init__(self, key: bytes) -> None:
            self._cipher = AESGCM(key)

        def encrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
            return self._cipher.encrypt(nonce, data, associated_data)

        def decrypt(self, nonce: bytes, data: bytes, associated_data: bytes) -> bytes:
            decryptions.append(nonce)
            return self._cipher.decrypt(nonce, data, associated_data)

    AESGCM = sealing.AESGCM
    monkeypatch.setattr(sealing, "AESGCM", Counting)
    security = server(NEW, OLD)
    counts: list[int] = []
    for token, session_id in (
        (sealed(security), SESSION),  # accepted
        (sealed(security), "another"),
        (sealed(server(OLD)), "another"),
        (sealed(server(OTHER)), SESSION),
    ):
        decryptions.clear()
        try:
            opened(security, token, session_id=session_id)
        except InvalidState:
            pass
        counts.append(len(decryptions))

    assert counts == [1, 1, 1, 1]


# --- what cannot be sealed ----------------------------------------------------------------


@FORMS
def test_a_token_may_have_max_token_characters_and_not_one_more(sign_only: bool) -> None:
    """STT8: oversized, by default over 4 KiB."""
    state = {"text": "x" * 500}
    token = sealed(server(sign_only=sign_only), state)
    enough = server(sign_only=sign_only, max_token=len(token))
    too_little = server(sign_only=sign_only, max_token=len(token) - 1)

    assert opened(enough, sealed(enough, state)) == (state, 3)
    with pytest.raises(StateTooLarge) as refused:
        sealed(too_little, state)
    assert (refused.value.size, refused.value.limit) == (len(token), len(token) - 1)
    assert face(refusal(too_little, token)) == REFUSED


def test_the_default_limit_is_4_kib() -> None:
    """STT7."""
    security = SessionSecurity([NEW])

    assert len(sealed(security, {"text": "x" * 2_900})) <= 4_096
    with pytest.raises(StateTooLarge):
        sealed(security, {"text": "x" * 3_100})


@FORMS
@pytest.mark.parametrize("audience", [None, AUDIENCE, "a" * 1_000])
def test_an_empty_state_has_a_token_at_the_least_limit(
    sign_only: bool, audience: str | None
) -> None:
    """CRE1: ``sessions/create`` always issues a ``state``, also an empty one."""
    security = server(sign_only=sign_only, audience=audience, max_token=256)

    token = sealed(security, {}, version=2**63 - 1, expires_at=1.2345678901234567e308)

    assert opened(security, token) == ({}, 2**63 - 1)


@FORMS
@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        float("inf"),
        (1, 2),
        {1: "a number as key"},
        2**64,
        date(2026, 7, 28),
        b"bytes",
        {"a set"},
        "half a character: \ud83d",
        Wrong("a dataclass"),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("nested", [False, True])
def test_what_would_not_come_back_is_not_sealed(
    sign_only: bool, value: object, nested: bool
) -> None:
    """A null in the place of a NaN would be found by nobody for a long time."""
    with pytest.raises(TypeError, match="JSON values only"):
        sealed(server(sign_only=sign_only), {"key": [value] if nested else value})


@pytest.mark.parametrize("moment", [float("nan"), float("inf")])
def test_a_token_expires_at_a_moment(moment: float) -> None:
    with pytest.raises(TypeError):
        sealed(server(), expires_at=moment)
