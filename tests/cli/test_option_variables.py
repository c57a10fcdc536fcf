"""Each option of ``serve`` as a variable of the environment: next to the command line, and
wrong.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from mcp_sessions.cli.main import main
from mcp_sessions.cli.option_variables import is_repeated, variable_of
from mcp_sessions.cli.serve_options import make_parser, parsed
from mcp_sessions.errors import ConfigurationError

ACTIONS = {action.option_strings[-1]: action for action in make_parser().shown_options()}

OTHER: Mapping[str, tuple[str, Any]] = {
    "--config": ("mcp.json", "mcp.json"),
    "--port": ("81", 81),
    "--path": ("/elsewhere", "/elsewhere"),
    "--health": ("/up", "/up"),
    "--dashboard": ("/sessions", "/sessions"),
    "--allowed-host": ("a.example", ["a.example"]),
    "--allowed-origin": ("https://a.example", ["https://a.example"]),
    "--log-level": ("debug", "debug"),
    "--log-format": ("json", "json"),
    "--per": ("shared", "shared"),
    "--eras": ("2026", "2026"),
    "--header": ("A: 1, 2; 3", [("A", "1, 2; 3")]),
    "--env": ("A=1", [("A", "1")]),
    "--handle": ("pay", ["pay"]),
    "--conversation-key": ("header:X-Chat", [("header", "X-Chat")]),
    "--request-key": ("header:X-Key", ["header:X-Key"]),
    "--hide": ("a*", ["a*"]),
    "--host": ("localhost", "localhost"),
    "--store": ("redis://localhost", "redis://localhost"),
    "--audit": ("audit.jsonl", "audit.jsonl"),
    "--cwd": ("/", "/"),
    "--forwarded-allow-ips": ("10.0.0.1", "10.0.0.1"),
    "--api-keys": ("keys.json", "keys.json"),
    "--auth-scope": ("use", ["use"]),
    "--auth-issuer": ("https://login.example", "https://login.example"),
    "--auth-audience": ("https://mcp.example/mcp", "https://mcp.example/mcp"),
    "--auth": ("github", "github"),
    "--allow": ("*@example.com", ["*@example.com"]),
    "--auth-introspect": ("https://login.example/ask", "https://login.example/ask"),
    "--ssl-certfile": ("cert.pem", "cert.pem"),
    "--ssl-keyfile": ("key.pem", "key.pem"),
}
"""A value of each option that is not a number and no flag."""

NEEDS = {"--per-principal", "--platform-ids", "--handle", "--conversation-key"}
"""They go with --conversations."""


def settings_of(option: str, text: str, *arguments: str) -> Any:
    action = ACTIONS[option]
    group = ["https://host/mcp"] if option == "--header" else ["--", sys.executable]
    if option in ("--config", "--reload-config"):
        group = []
    more = ["--conversations"] if option in NEEDS else []
    if option == "--dashboard-actions":
        more += ["--dashboard", "/sessions"]
    if option in ("--task-after", "--task-tools"):
        more = ["--tasks"]
    if option == "--reload-config":
        more = ["--config", "mcp.json"]
    if option == "--ssl-keyfile":
        more = ["--ssl-certfile", "cert.pem"]
    if option == "--allowed-origin":
        more = ["--allowed-host", "a.example"]
    if option == "--auth-scope":
        more = ["--api-keys", "keys.json"]
    if option == "--auth-issuer":
        more = ["--auth-audience", "https://mcp.example/mcp"]
    if option == "--auth":
        more = ["--allow", "*"]
    if option == "--allow":
        more = ["--auth", "github"]
    if option == "--auth-introspect":
        more = ["--auth-issuer", "https://login.example"]
        more += ["--auth-audience", "https://mcp.example/mcp"]
    if option == "--auth-audience":
        more = ["--auth-issuer", "https://login.example"]
    options = parsed([*more, *arguments, *group], {variable_of(option): text})
    return getattr(options, action.dest)


@pytest.mark.parametrize("option", ACTIONS)
def test_each_option_has_its_variable(option: str) -> None:
    """Also one that is added later."""
    action = ACTIONS[option]
    if action.nargs == 0:
        if option not in ("--readable-state", "--conversations", *NEEDS):
            assert settings_of(option, "no", *(["--port", "0"] if option == "--stdio" else [])) is (
                False
            )
        assert settings_of(option, "Yes") is True
        return
    text, value = OTHER.get(option, ("7", 7))
    assert settings_of(option, text) == value
    if is_repeated(action):
        for between in ("||", " || ", "\n"):
            assert settings_of(option, f"{text}{between}{text}") == value * 2


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("--host", ["--host", "127.0.0.1"], "127.0.0.1"),
        ("--port", ["--port", "8000"], 8000),
        ("--grace", ["--grace", "10"], 10),
        ("--hide", ["--hide", "b*"], ["b*"]),
        ("--allowed-host", ["--allowed-host", "b.example"], ["b.example"]),
        ("--access-log", ["--access-log"], True),
    ],
)
def test_the_command_line_replaces_a_variable(option: str, given: list[str], expected: Any) -> None:
    """Also where it says what is the default."""
    text = "no" if option == "--access-log" else OTHER.get(option, ("7", 7))[0]
    assert settings_of(option, text, *given) == expected


def test_a_server_of_the_command_line_replaces_a_file_of_servers() -> None:
    options = parsed(["app.py"], {"MCP_SESSIONS_CONFIG": "mcp.json"})
    assert (options.target, options.config) == ("app.py", None)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("MCP_SESSIONS_PORT", "70000", "MCP_SESSIONS_PORT: must be a number from 0 to 65535"),
        ("MCP_SESSIONS_PORT", " ", "MCP_SESSIONS_PORT is empty: unset it, or give it a value"),
        ("MCP_SESSIONS_STORE", "", "MCP_SESSIONS_STORE is empty"),
        ("MCP_SESSIONS_STDIO", "on", "MCP_SESSIONS_STDIO: must be one of 1, true, yes, 0"),
        ("MCP_SESSIONS_LOG_LEVEL", "loud", "MCP_SESSIONS_LOG_LEVEL: must be one of debug"),
        ("MCP_SESSIONS_LOG_FORMAT", "xml", "MCP_SESSIONS_LOG_FORMAT: must be one of text"),
        ("MCP_SESSIONS_ALLOWED_ORIGIN", "https://a||b", "MCP_SESSIONS_ALLOWED_ORIGIN: must be an"),
        (
            "MCP_SESSIONS_HEADER",
            "A: 1",
            "--header is only for a URL: leave it out for this server (set by MCP_SESSIONS_HEADER)",
        ),
        ("MCP_SESSIONS_STORE", "floppy://a/b", "(set by MCP_SESSIONS_STORE)"),
    ],
)
def test_a_wrong_value_names_its_variable(
    variable: str,
    text: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, text)

    assert main(["serve", "nowhere.py"]) == 2

    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_an_error_about_something_else_names_no_variable() -> None:
    with pytest.raises(ConfigurationError) as refused:
        parsed(["--header", "A: 1", "app.py"], {"MCP_SESSIONS_PORT": "1"})
    assert "MCP_SESSIONS" not in str(refused.value)


def test_a_variable_that_sets_nothing_is_warned_of_in_one_line() -> None:
    environment = {"MCP_SESSIONS_PROT": "1", "MCP_SESSIONS_WORKER": "1", "MCP_SESSIONS_KEYS": "k"}

    options = parsed(["app.py"], environment)

    assert options.unknown_variables == [
        "MCP_SESSIONS_PROT; did you mean MCP_SESSIONS_PORT?",
        "MCP_SESSIONS_WORKER; did you mean MCP_SESSIONS_WORKERS?",
    ]


def test_a_process_is_served_by_its_environment(tmp_path: Path) -> None:
    """The log is JSON from its first line, which is a warning."""
    (tmp_path / "app.py").write_text(
        dedent("""
            from mcp.server import MCPServer
            mcp = MCPServer("notes")
        """)
    )
    environment = {
        **os.environ,
        "MCP_SESSIONS_PORT": "0",
        "MCP_SESSIONS_STDIO": "1",
        "MCP_SESSIONS_PATH": "/there",
        "MCP_SESSIONS_LOG_FORMAT": "json",
        "MCP_SESSIONS_PROT": "1",
    }
    command = [sys.executable, "-m", "mcp_sessions.cli", "serve", "app.py"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert "these variables set no option of serve: MCP_SESSIONS_PROT" in lines[0]
    assert any("/there" in line and '"message": "serving"' in line for line in lines[1:])
    assert all(line.startswith("{") for line in lines)


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    from mcp_sessions.cli.option_variables import warn_of

    with caplog.at_level(logging.WARNING):
        warn_of([])
        warn_of(["MCP_SESSIONS_PROT"])
    assert [record.getMessage() for record in caplog.records] == [
        "these variables set no option of serve: MCP_SESSIONS_PROT"
    ]
