"""No address that is shown has a credential."""

import pytest

from mcp_sessions.cli.arguments import redacted, without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://", "memory://"),
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://:secret@localhost/0", "redis://:***@localhost/0"),
        ("redis://user:se%40cret@localhost/0?a=b", "redis://user:***@localhost/0?a=b"),
        (
            "redis://localhost/0?username=u&password=se%40cret&namespace={server}",
            "redis://localhost/0?username=***&password=***&namespace={server}",
        ),
    ],
)
def test_a_store_is_shown_without_its_password(url: str, shown: str) -> None:
    assert redacted(url) == shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:key@a.example:1/otlp?key=1#x", "https://a.example:1/otlp"),
        ("user:key@a.example:4317", "a.example:4317"),
        ("a.example:4317", "a.example:4317"),
        ("http://[::1]:4318/v1/traces", "http://[::1]:4318/v1/traces"),
        ("http://user:k/ey@a.example", "an address that cannot be read"),
        ("http://[x", "an address that cannot be read"),
    ],
)
def test_no_credential_of_an_address_is_shown(url: str, shown: str) -> None:
    assert without_secrets(url) == shown
