"""Who a client is behind proxies: what they say of it, and who is believed."""

import pytest

from mcp_sessions.core.addresses import address_of, text_of_address
from mcp_sessions.core.proxies import Proxies, scheme_of
from mcp_sessions.errors import ConfigurationError

NAMED = Proxies("10.0.0.0/8, 127.0.0.1, ::1, fd00::/8")


@pytest.mark.parametrize(
    ("said", "client"),
    [
        (["203.0.113.7"], "203.0.113.7"),
        ([" 203.0.113.7\t"], "203.0.113.7"),
        (["203.0.113.7:4711"], "203.0.113.7"),
        (["2001:db8::7"], "2001:db8::7"),
        (["[2001:DB8::7]"], "2001:db8::7"),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["::ffff:203.0.113.7"], "203.0.113.7"),
        # The link is one of the proxy.
        (["fe80::1%eth0"], "fe80::1"),
        (["[fe80::1%25eth0]:4711"], "fe80::1"),
        (["::ffff:203.0.113.7%eth0"], "203.0.113.7"),
        # The last one that is no proxy, of all values.
        (["192.0.2.1, 203.0.113.7"], "203.0.113.7"),
        (["192.0.2.1", "203.0.113.7"], "203.0.113.7"),
        (["192.0.2.1, 203.0.113.7, 10.1.2.3"], "203.0.113.7"),
        (["203.0.113.7, [fd00::1]:80, ::ffff:10.0.0.1"], "203.0.113.7"),
        # All are proxies: one of them is the client.
        (["10.1.1.1, 10.2.2.2"], "10.1.1.1"),
        # What is no address, and what was said before it.
        ([], None),
        ([""], None),
        (["unknown"], None),
        (["_hidden"], None),
        (["evil, 203.0.113.7"], "203.0.113.7"),
        (["203.0.113.7, evil"], None),
        (["203.0.113.7, evil, 10.0.0.1"], "10.0.0.1"),
        (["203.0.113.7,"], None),
        (["localhost"], None),
        (["203.0.113"], None),
        (["203.0.113.7.8"], None),
        (["203.0.113.007"], None),
        (["203.0.113.7:port"], None),
        (["203.0.113.7 evil"], None),
        (["203.0.113.7\n"], None),
        (["203.0.113.0/24"], None),
        (["[203.0.113.7]"], None),
        (["[2001:db8::7"], None),
        (["2001:db8::7]"], None),
        (["fe80::1%"], None),
        (["203.0.113.7%eth0"], None),
        (["fe80::1%eth0 evil"], None),
        (["\u0661.1.1.1"], None),
        (["3405803783"], None),
        (['"203.0.113.7"'], None),
        (["for=203.0.113.7"], None),
    ],
)
def test_the_client_is_the_last_address_that_is_no_proxy(
    said: list[str], client: str | None
) -> None:
    assert NAMED.client_of(said) == client


def test_a_client_of_any_proxy_is_whom_the_nearest_one_names() -> None:
    """What comes before it, a client may have written itself."""
    assert Proxies("*").client_of(["192.0.2.1, 203.0.113.7"]) == "203.0.113.7"


@pytest.mark.parametrize(
    ("peer", "is_named"),
    [
        ("10.9.8.7", True),
        ("::ffff:10.9.8.7", True),
        ("127.0.0.1", True),
        ("127.0.0.2", False),
        ("::1", True),
        ("fd00::1", True),
        ("192.0.2.1", False),
        ("testclient", False),
        ("", False),
        (None, False),
    ],
)
def test_a_peer_is_a_proxy_if_it_was_named(peer: str | None, is_named: bool) -> None:
    assert NAMED.have(peer) == is_named
    assert Proxies("*").have(peer) and Proxies("10.0.0.1, *").have(peer)


@pytest.mark.parametrize(
    ("named", "peer", "is_named"),
    [
        # As a server that listens on both families sees its peers, and as one that does not.
        ("::ffff:10.0.0.0/104", "::ffff:10.1.2.3", True),
        ("::ffff:10.0.0.0/104", "10.1.2.3", True),
        ("::ffff:10.1.2.3/104", "10.200.0.1", True),
        ("::ffff:a00:0/104", "10.1.2.3", True),
        ("::ffff:10.0.0.0/104", "11.0.0.1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "10.0.0.2", False),
        ("10.0.0.0/8", "::ffff:a01:203", True),
        ("::ffff:0:0/96", "192.0.2.1", True),
        ("::/0", "10.0.0.1", False),
        # A link-local address is seen with its link.
        ("fe80::/10", "fe80::1%eth0", True),
        ("fe80::1", "fe80::1%eth0", True),
        ("fe80::1", "fe80::1%2", True),
        ("fe80::1%eth0", "fe80::1%eth0", True),
        ("fe80::%eth0/64", "fe80::1%eth0", True),
        ("fe80::1%eth0/64", "fe80::2%eth0", True),
        ("fe80::1%eth0", "fe80::1%eth1", False),
        ("fe80::1%eth0", "fe80::1", False),
        ("fe80::/64", "fe80:0:0:1::1%eth0", False),
    ],
)
def test_a_mapped_address_is_the_ipv4_one_and_a_zone_is_no_other_address(
    named: str, peer: str, is_named: bool
) -> None:
    """Rules 6 and 7. A network that was written so matched nobody, in silence."""
    assert Proxies(named).have(peer) == is_named
    # Of what a proxy says, nobody here knows the link.
    is_passed = is_named and "%" not in named
    assert (Proxies(named).client_of([f"192.0.2.77, {peer}"]) == "192.0.2.77") == is_passed


@pytest.mark.parametrize(
    "named",
    [
        "",
        "fe80::1%",
        "10.0.0.1%eth0",
        "%eth0",
        "localhost",
        "10.0.0.0/99",
        "10.0.0.1;10.0.0.2",
        "10.0.0.1,",
    ],
)
def test_what_is_no_address_names_no_proxy(named: str) -> None:
    with pytest.raises(ConfigurationError, match="must be addresses or networks"):
        Proxies(named)


@pytest.mark.parametrize(
    ("said", "scheme"),
    [
        (["https"], "https"),
        ([" HTTPS "], "https"),
        (["wss"], "wss"),
        (["https", "http"], "http"),
        (["http, https"], "https"),
        ([], None),
        (["gopher"], None),
        (["https;evil"], None),
    ],
)
def test_a_scheme_is_one_that_we_serve(said: list[str], scheme: str | None) -> None:
    assert scheme_of(said) == scheme


def test_a_client_that_is_no_address_has_no_name_of_its_own() -> None:
    """Another ASGI server may take any text out of a header. It is no way around a limit."""
    one, other = ({"client": (text, 0)} for text in ("evil", "evil2"))
    assert address_of(one) == address_of(other) is not None
    assert text_of_address(one) is None
    assert text_of_address({"client": ("203.0.113.7", 1)}) == "203.0.113.7"
    assert text_of_address({"client": None}) is None is address_of({})
