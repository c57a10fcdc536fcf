"""A wrong address is refused with what was meant, and never with a secret in it."""

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_sessions import resumable
from mcp_sessions.core.addresses import HTTP, HTTP_AND_WEBSOCKET, lacks_scheme, wrong_address
from mcp_sessions.errors import ConfigurationError

NAMES = st.from_regex(r"[a-z][a-z0-9]{0,8}(\.[a-z][a-z0-9]{0,8}){1,2}", fullmatch=True)
PATHS = st.from_regex(r"(/[a-z0-9]{1,6}){0,3}", fullmatch=True)
PORTS = st.integers(1, 65_535)


@given(NAMES, PORTS, PATHS, st.sampled_from(HTTP_AND_WEBSOCKET))
def test_an_address_is_right_with_its_scheme_and_named_without(
    name: str, port: int, path: str, scheme: str
) -> None:
    address = f"{name}:{port}{path}"

    assert wrong_address(f"{scheme}://{address}?key=value", HTTP_AND_WEBSOCKET) is None
    assert lacks_scheme(address)
    said = wrong_address(f"me:SECRET@{address}?key=SECRET#SECRET", HTTP_AND_WEBSOCKET)
    assert said is not None and said.endswith(f"did you mean https://{address}?")
    assert "SECRET" not in said


@given(st.from_regex(r"[a-z][a-z0-9+]{1,6}", fullmatch=True), NAMES, PATHS)
def test_another_scheme_is_named_with_one_that_can_be(scheme: str, name: str, path: str) -> None:
    said = wrong_address(f"{scheme}://me:SECRET@{name}{path}?key=SECRET", HTTP)

    if scheme in HTTP:
        assert said is None
    else:
        assert said is not None and "SECRET" not in said
        meant = said.rpartition("did you mean ")[2].removesuffix("?")
        assert urlsplit(meant).scheme in HTTP and meant.endswith(f"//{name}{path}")


@given(st.text(max_size=40))
def test_any_text_is_an_address_or_has_a_reason(text: str) -> None:
    said = wrong_address(text, HTTP)

    assert said is not None or urlsplit(text).hostname


@pytest.mark.parametrize(
    "given", ["http://host:0/mcp", "http://:8000/mcp", "http://host:99999/mcp", "http://a b/mcp"]
)
def test_an_address_without_a_host_or_a_port_that_exists_is_not_whole(given: str) -> None:
    assert "is not a whole address" in str(wrong_address(given, HTTP))


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("127.0.0.1:8633/mcp", "http://127.0.0.1:8633/mcp"),
        ("localhost/mcp", "http://localhost/mcp"),
        ("[::1]:80/mcp", "http://[::1]:80/mcp"),
        ("htp://x", "http://x"),
        ("htps://x", "https://x"),
        ("wws://x", "ws://x"),
        ("https:/x", "https://x"),
    ],
)
def test_a_client_is_notified_what_was_meant(given: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        resumable(given)
    assert str(refused.value).endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("text", ["pkg.app:mcp", "app:mcp", "dir/app:mcp", "pkg.app", "app:0", ""])
def test_the_name_of_an_object_is_no_address(text: str) -> None:
    assert not lacks_scheme(text)
