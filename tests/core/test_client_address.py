"""Whose requests they are, by the address that they come from."""

import pytest

from mcp_sessions.core.addresses import address_of, text_of_address


def scope(address: str) -> dict[str, object]:
    return {"client": (address, 50_000)}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.1", True),
        ("10.0.0.1", "10.0.0.2", False),
        # One client has every address of a network of 64 bits.
        ("2001:db8:0:1::1", "2001:db8:0:1:ffff::2", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        # The same client, over a socket of both families.
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        # A text that is no address makes nobody another client.
        ("a name", "another name", True),
        ("a name", "10.0.0.1", False),
    ],
)
def test_who_is_one_client(one: str, other: str, is_same: bool) -> None:
    assert (address_of(scope(one)) == address_of(scope(other))) is is_same


def test_who_has_no_address() -> None:
    for nobody in (None, {}, {"client": None}):
        assert address_of(nobody) is None
        assert text_of_address(nobody) is None


def test_the_address_that_a_record_has() -> None:
    assert text_of_address(scope("2001:db8::1")) == "2001:db8::1"
    assert text_of_address(scope("10.0.0.1")) == "10.0.0.1"
    assert text_of_address(scope("a name")) is None
