"""What a command inherits: how to reach the network, and no credential of the layer."""

import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sessions import StdioServer
from tests.support.children import CHILD

REACHES = {
    "HTTPS_PROXY": "http://proxy:3128",
    "http_proxy": "http://proxy:3128",
    "ALL_PROXY": "socks5://proxy:1080",
    "no_proxy": "localhost,.example.com",
    "SSL_CERT_FILE": "/etc/ssl/a@b/ca.pem",
    "SSL_CERT_DIR": "/etc/ssl/certs",
    "NODE_EXTRA_CA_CERTS": "/etc/ssl/ca.pem",
    "REQUESTS_CA_BUNDLE": "/etc/ssl/ca.pem",
    "CURL_CA_BUNDLE": "/etc/ssl/ca.pem",
    "DOCKER_HOST": "ssh://me@host",
    "KUBECONFIG": "/home/me/.kube/a:/home/me/.kube/b",
    "NPM_CONFIG_CACHE": "/var/cache/npm",
    "npm_config_registry": "https://npm.example.com/",
    "UV_CACHE_DIR": "/var/cache/uv",
    "UV_INDEX": "own=https://pypi.example.com/simple https://other.example.com/simple",
    "PIP_INDEX_URL": "https://pypi.example.com/simple",
    "GOPROXY": "https://go.example.com,direct",
    "GOPRIVATE": "*.corp.example.com",
    "GIT_SSH_COMMAND": "ssh -i /home/me/.ssh/deploy",
    "COREPACK_NPM_REGISTRY": "https://npm.example.com/",
    "XDG_CACHE_HOME": "/var/cache",
    "ws_proxy": "http://proxy:3128",
    "YARN_HTTPS_PROXY": "http://proxy:3128",
    "CARGO_HTTP_PROXY": "http://proxy:3128",
    "AWS_CA_BUNDLE": "/etc/ssl/ca.pem",
    "CARGO_HTTP_CAINFO": "/etc/ssl/ca.pem",
    "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE": "/etc/ssl/ca.pem",
    "DENO_TLS_CA_STORE": "system",
    "DOCKER_CERT_PATH": "/home/me/.docker",
    "ELASTIC_CA_CERT": "/etc/ssl/ca.pem",
    "GIT_SSL_CAPATH": "/etc/ssl/certs",
    "HEX_CACERTS_PATH": "/etc/ssl/ca.pem",
    "HTTPLIB2_CA_CERTS": "/etc/ssl/ca.pem",
    "MY_APP_CERT_DIR": "/etc/ssl/certs",
    "MYSQL_SSL_CA": "/etc/ssl/ca.pem",
    "NIX_SSL_CERT_FILE": "/etc/ssl/ca.pem",
    "npm_config_cafile": "/etc/ssl/ca.pem",
    "VAULT_CACERT": "/etc/ssl/ca.pem",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "KUBERNETES_SERVICE_PORT_HTTPS": "443",
}
SECRET = {
    "HTTPS_PROXY": "http://me:s3cret@proxy:3128",
    "http_proxy": "me:s3/cret@proxy:3128",
    "UV_INDEX": "https://a.example.com/ own=https://s3cret@pypi.example.com/simple",
    "PIP_INDEX_URL": "https://pypi.example.com/simple?token=s3cret",
    "DOCKER_HOST": "ssh://me:s3cret@host",
    "npm_config_proxy": "http://me:s3/cr@et@proxy",
    "YARN_HTTPS_PROXY": "http://me:s3cret@proxy:3128",
}
OTHERS = {
    "MCP_SESSIONS_KEYS": "s3cret",
    "GITHUB_TOKEN": "s3cret",
    "UV_INDEX_OWN_PASSWORD": "s3cret",
    "UV_PUBLISH_TOKEN": "s3cret",
    "NPM_CONFIG__AUTH": "s3cret",
    "npm_config__authtoken": "s3cret",
    "STRIPE_API_KEY_CA": "s3cret",
    "PROXY_TOKEN_PROXY": "s3cret",
    "MY_CA_KEY": "s3cret",
    "MY_CA_PASSWORD": "s3cret",
    "MY_CACHE": "no certificate",
    "home": "no other spelling",
}


def put(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    for name in {*REACHES, *SECRET, *OTHERS}:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_a_command_gets_what_says_how_to_reach_the_network(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Behind a proxy ``npx`` could load nothing, and nothing said why."""
    put(monkeypatch, {**REACHES, **OTHERS})
    env = StdioServer(sys.executable, CHILD).env
    assert {name: env[name] for name in REACHES} == REACHES
    assert not OTHERS.keys() & env.keys()
    assert caplog.messages == []


@pytest.mark.parametrize("name", SECRET)
def test_a_value_with_a_credential_is_named_and_not_passed_on(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(monkeypatch, {name: SECRET[name]})
    assert name not in StdioServer(sys.executable, CHILD, title="files").env
    [line] = caplog.messages
    assert (
        line
        == f"files does not get {name}, whose value has a credential: pass it on with --env {name}"
    )

    caplog.clear()
    given = StdioServer(sys.executable, CHILD, env={name: SECRET[name]})
    assert (given.env[name], caplog.messages) == (SECRET[name], [])


@pytest.mark.parametrize("name", ["SSH_AUTH_SOCK", "KRB5CCNAME"])
def test_an_agent_with_credentials_is_named_and_not_passed_on(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    put(monkeypatch, {})
    monkeypatch.setenv(name, "/run/agent.sock")
    assert name not in StdioServer(sys.executable, CHILD, title="files").env
    assert any(f"files does not get {name}" in line for line in caplog.messages)
    assert not any("agent.sock" in line for line in caplog.messages)

    caplog.clear()
    given = StdioServer(sys.executable, CHILD, env={name: "/run/agent.sock"})
    assert given.env[name] == "/run/agent.sock"
    assert not any(name in line for line in caplog.messages)


def test_the_check_names_what_is_not_passed_on(tmp_path: Path) -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "mcp_sessions.cli", "serve", "--check", "--port", "0", "--"]
        + [sys.executable, CHILD],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HTTPS_PROXY": "http://s3cret@proxy"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stderr.count("does not get HTTPS_PROXY") == 1
    assert "s3cret" not in checked.stdout + checked.stderr
