"""``mcp_sessions.core.life``: when a session expires, and who may use it."""

import math
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.core.life import (
    Admission,
    Life,
    admission,
    deadline_of,
    has_come,
    idle_deadline,
    idle_time,
    is_unused,
    new_life,
    unused_by,
)
from mcp_sessions.core.states import Mode
from mcp_sessions.ids import FencingEpoch
from mcp_sessions.policy import SessionPolicy
from mcp_sessions.principal import Principal

ALICE, BOB = Principal("client", "issuer", "alice"), Principal("client", "issuer", "bob")


@dataclass(slots=True)
class Known:
    principal: Principal = ALICE
    mode: Mode = Mode.PROTOCOL
    life: Life = field(default_factory=lambda: Life(0.0, 10.0, 100.0))
    fencing_epoch: FencingEpoch = FencingEpoch(3)


OWN = Known()


def ask(
    session: Known = OWN,
    principal: Principal = ALICE,
    *,
    mode: Mode = Mode.PROTOCOL,
    now: float = 5.0,
    held: bool = False,
    epoch: int | None = None,
) -> Admission:
    known = FencingEpoch(epoch) if epoch is not None else None
    return admission(session, principal, mode=mode, now=now, held=held, fencing_epoch=known)


def test_its_owner_is_admitted() -> None:
    assert ask() is ask(epoch=3) is Admission.ADMITTED


@given(st.sampled_from(Mode), st.sampled_from([5.0, 10.0, 100.0]), st.none() | st.integers(0, 4))
def test_a_stranger_is_refused_whatever_else_is_so(
    mode: Mode, now: float, epoch: int | None
) -> None:
    """SES8: the owner first. All other answers would say that there is such a session."""
    assert ask(principal=BOB, mode=mode, now=now, epoch=epoch) is Admission.REFUSED


@pytest.mark.parametrize(
    ("now", "held", "expected"),
    [
        (9.9, False, Admission.ADMITTED),
        (10.0, False, Admission.REFUSED),
        (10.0, True, Admission.ADMITTED),
        (100.0, True, Admission.REFUSED),
    ],
)
def test_a_session_that_has_ended_admits_nothing(
    now: float, held: bool, expected: Admission
) -> None:
    """SES13, SES14, SES15: idle for too long, but not while it is running; and the latest end."""
    assert ask(now=now, held=held) is expected


@pytest.mark.parametrize("of", Mode)
@pytest.mark.parametrize("asked", Mode)
def test_a_session_of_the_other_mode_says_so_but_for_another_protocols(
    of: Mode, asked: Mode
) -> None:
    """SES11: the caller learns why; between MCP and ACP, and of what no message names, there
    is nothing to learn.
    """
    answer = ask(replace(OWN, mode=of), mode=asked, epoch=2 if of is not asked else None)

    if of is asked:
        assert answer is Admission.ADMITTED
    elif {of, asked} != {Mode.PROTOCOL, Mode.TRANSPORT}:
        assert answer is Admission.REFUSED
    else:
        assert answer is Admission.OTHER_MODE


@pytest.mark.parametrize("epoch", [2, 4])
def test_who_knows_another_attachment_is_displaced(epoch: int) -> None:
    """TKO6: a later one, or one that a store lost."""
    assert ask(epoch=epoch) is Admission.DISPLACED


@pytest.mark.parametrize("mode", [Mode.AGENT, Mode.CONNECTION])
def test_a_session_of_an_agent_or_of_a_connection_has_no_end(mode: Mode) -> None:
    life = new_life(mode, now=5.0, policy=SessionPolicy(max_lifetime=100))

    assert life.expires_at == life.ends_at == idle_time(mode, SessionPolicy()) == math.inf
    assert not has_come(life.expires_at, 1e12)
    assert not is_unused(life, math.inf)


def test_keys_are_of_use_until_the_last_of_them_is_forgotten() -> None:
    """And as long after that as a session that is unused."""
    policy = SessionPolicy(idle_timeout=10, request_key_lifetime=300)
    assert idle_time(Mode.KEYS, policy) == 310
    assert idle_time(Mode.KEYS, replace(policy, forget_after=1_000)) == 1_300


@given(st.floats(0, 1e6), st.floats(1, 1e4), st.floats(1, 1e4))
def test_no_use_of_a_session_moves_its_latest_end(now: float, idle: float, more: float) -> None:
    """SES15."""
    policy = SessionPolicy(idle_timeout=idle, max_lifetime=more)
    life = new_life(Mode.TRANSPORT, now=now, policy=policy)

    assert now < life.expires_at <= life.ends_at == now + more
    assert life.expires_at == idle_deadline(now=now, idle_timeout=idle, ends_at=life.ends_at)
    assert idle_deadline(now=life.ends_at, idle_timeout=idle, ends_at=life.ends_at) == life.ends_at


@pytest.mark.parametrize("of", [(10.0, 100.0), ("expires", "ends")])
def test_the_idle_deadline_counts_but_while_a_request_runs(of: tuple[object, object]) -> None:
    """SES14."""
    assert deadline_of(*of, held=False) is of[0]
    assert deadline_of(*of, held=True) is of[1]


def test_a_session_is_unused_if_its_idle_deadline_says_so() -> None:
    """SES20: nobody knows when a session was used if its lifetime ends first."""
    policy = SessionPolicy(idle_timeout=10, max_lifetime=1_000)
    life = new_life(Mode.TRANSPORT, now=5.0, policy=policy)

    assert is_unused(life, unused_by(Mode.TRANSPORT, 8.0, 3.0, policy))
    assert not is_unused(life, unused_by(Mode.TRANSPORT, 7.9, 3.0, policy))
    assert not is_unused(Life(0.0, 100.0, 100.0), 100.0)
