"""Addresses of issuers, and where their documents are."""

import pytest

from mcp_sessions.authentication.issuer_addresses import checked_url, discovery_urls
from mcp_sessions.errors import ConfigurationError
from tests.support.issuers import URL


def test_its_document_is_looked_for_where_mcp_says() -> None:
    """MCP authorization, "Authorization Server Metadata Discovery": RFC 8414, then OpenID."""
    assert discovery_urls("https://a.example/t") == (
        "https://a.example/.well-known/oauth-authorization-server/t",
        "https://a.example/.well-known/openid-configuration/t",
        "https://a.example/t/.well-known/openid-configuration",
    )
    assert discovery_urls("https://a.example/") == (
        "https://a.example/.well-known/oauth-authorization-server",
        "https://a.example/.well-known/openid-configuration",
    )


@pytest.mark.parametrize(
    "url",
    [
        "",
        "login.example",
        "http://login.example",
        "https://a?b",
        "https://a#b",
        "ftp://a",
        "http://[",
    ],
)
def test_an_issuer_is_https(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--auth-issuer: must be an https URL"):
        checked_url("--auth-issuer", url)


@pytest.mark.parametrize("url", ["https://a/b", "http://127.0.0.1:1/", "http://localhost", URL])
def test_on_loopback_http_is_good(url: str) -> None:
    assert checked_url("--auth-issuer", url) == url
