"""The ids of sessions that are found by a name."""

from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions.ids import parse_session_id
from mcp_sessions.principal import ANONYMOUS, Principal
from mcp_sessions.security import SessionSecurity

OLD, NEW = "o" * 32, "n" * 32
ALICE = Principal("client", "https://issuer.example", "alice")

names = st.text(max_size=20)
principals = st.builds(
    Principal, st.none() | st.text(max_size=3), st.none() | st.text(max_size=3), st.text(max_size=3)
)


@given(st.lists(st.tuples(names, names, principals), min_size=2, max_size=6, unique=True))
def test_no_two_names_share_an_id(named: list[tuple[str, str, Principal]]) -> None:
    """Not of two principals, nor of two kinds, however the texts are divided."""
    security = SessionSecurity([NEW])
    ids = [security.conversation_ids(source, name, principal=who)[0] for source, name, who in named]
    assert len(set(ids)) == len(named)


def test_an_id_is_the_same_on_every_replica_and_for_every_credential_of_an_identity() -> None:
    weaker = Principal(ALICE.client_id, ALICE.issuer, ALICE.subject, frozenset({"read"}))
    one = SessionSecurity([NEW]).conversation_ids("host", "x", principal=ALICE)
    other = SessionSecurity([NEW]).conversation_ids("host", "x", principal=weaker)
    assert one == other == [parse_session_id(one[0])]


def test_a_key_that_is_rotated_out_is_still_asked() -> None:
    """Newest first; another secret, or another service, knows neither."""
    old, new = SessionSecurity([OLD]), SessionSecurity([NEW])
    both = SessionSecurity([NEW, OLD]).conversation_ids("host", "x", principal=ANONYMOUS)
    assert both == [
        *new.conversation_ids("host", "x", principal=ANONYMOUS),
        *old.conversation_ids("host", "x", principal=ANONYMOUS),
    ]
    other = SessionSecurity([NEW], audience="other")
    assert other.conversation_ids("host", "x", principal=ANONYMOUS)[0] not in both
