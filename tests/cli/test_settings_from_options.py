"""A file that has a ``SessionLayer`` already, served with options: the options win."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx2
import pytest

from mcp_sessions import ConfigurationError, Conversations, SessionLayer, SessionPolicy, TaskPolicy
from mcp_sessions.cli.main import main
from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.settings_from_options import options_over
from mcp_sessions.cli.targets import load_target
from mcp_sessions.external_server import StdioServer
from mcp_sessions.layer_settings import AGENT_REPLACED, REPLACED, LayerSettings, replacing
from tests.support.children import CHILD
from tests.support.serving import read_lines, serving

Checked = Callable[..., tuple[str, list[str]]]

APP = """
from mcp.server import MCPServer
from mcp_sessions import Conversations, SessionLayer, SessionPolicy

mcp = MCPServer("notes")
layer = SessionLayer(
    mcp,
    store="sqlite:///of_the_file.db",
    policy=SessionPolicy(max_events=7, idle_timeout=77),
)
taken = layer.store, layer.policy, layer.sessions
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MCP_SESSIONS_KEYS", "k" * 43)
    return tmp_path


@pytest.fixture
def checked(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> Callable[..., tuple[str, list[str]]]:
    """Runs ``--check``: what it prints, and the lines of the log."""

    def run(*options: str) -> tuple[str, list[str]]:
        status = main(["serve", "app.py", "--port", "0", "--check", *options])
        out = capsys.readouterr().out
        assert status == 0, out
        return out, caplog.messages

    return run


def settings(*options: str, environment: dict[str, str] | None = None) -> argparse.Namespace:
    return parsed(["app.py", *options], environment or {})


def test_a_limit_wins_and_the_files_other_limits_stay(checked: Checked) -> None:
    out, log = checked("--max-events", "5")

    assert "events of a session for replay: 5" in out
    assert "sleeps after 77s" in out
    assert log == ["--max-events wins over the layer of app.py"]


def test_a_store_wins(checked: Checked, here: Path) -> None:
    out, _ = checked("--store", "sqlite:///of_the_command.db")

    assert "sqlite:///of_the_command.db" in out
    assert not (here / "of_the_file.db").exists()


def test_nothing_is_said_where_nothing_is_replaced(checked: Checked) -> None:
    out, log = checked()

    assert "events of a session for replay: 7" in out
    assert log == []


def test_a_variable_wins_and_is_named(checked: Checked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MCP_SESSIONS_MAX_EVENTS", "6")

    out, log = checked()

    assert "events of a session for replay: 6" in out
    assert log == ["MCP_SESSIONS_MAX_EVENTS wins over the layer of app.py"]


@pytest.mark.parametrize(
    "limit", [each.name for each in fields(SessionPolicy) if each.name != "coalescing"]
)
def test_each_limit_is_an_option_by_its_name(limit: str) -> None:
    named: dict[str, Any] = {limit: 7}
    option = f"--{limit.replace('_', '-')}"
    # Some are only for a server outside of this process.
    options = parsed([option, "7", "--", sys.executable], {})

    assert options_over(options, LayerSettings()).policy == SessionPolicy(**named)


@pytest.mark.parametrize(
    ("option", "text", "value"),
    [
        ("--max-lifetime", "90d", 7_776_000),
        ("--progress-every", "0", 0),
        ("--max-requests-per-principal", "2.5", 2.5),
    ],
)
def test_a_limit_is_a_time_or_a_number(option: str, text: str, value: float) -> None:
    name = option.removeprefix("--").replace("-", "_")

    assert getattr(options_over(settings(option, text), LayerSettings()).policy, name) == value


def test_the_code_of_the_file_has_what_is_served(here: Path) -> None:
    """It may take ``layer.store`` as soon as the layer is made."""
    (here / "app.py").rename(here / "app_that_takes.py")
    options = settings("--max-events", "5")
    with replacing(REPLACED, lambda said: options_over(options, said)):
        layer: Any = load_target(
            "app_that_takes.py", kinds=[lambda it: isinstance(it, SessionLayer)]
        )

    store, policy, sessions = vars(sys.modules.pop("app_that_takes"))["taken"]
    assert layer.policy.max_events == 5
    assert layer.policy is policy and layer.store is store and layer.sessions is sessions


@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        (["--hide", "a*", "--hide", "b"], "hidden", ["a*", "b"]),
        (["--conversations"], "conversations", Conversations(handle=["old"])),
        (
            ["--conversations", "--handle", "new", "--per-principal"],
            "conversations",
            Conversations(handle=["new"], per_principal=True),
        ),
        (["--tasks"], "tasks", TaskPolicy(never=["x"])),
        (["--tasks", "--task-after", "9"], "tasks", TaskPolicy(never=["x"], after=9)),
        (["--eras", "2025"], "eras", "2025"),
        (["--request-key", "header:X-Key"], "request_keys", ["header:X-Key"]),
        (["--max-age", "1h"], "policy", SessionPolicy(max_events=3, max_age=3_600)),
        (
            ["--conversations", "--conversation-key", "header:X-Chat"],
            "conversations",
            Conversations(handle=["old"], headers=["X-Chat"]),
        ),
        (["--tasks", "--task-tools"], "tasks", TaskPolicy(never=["x"], tools=True)),
        (["--idle-timeout", "60"], "policy", SessionPolicy(max_events=3, idle_timeout=60)),
    ],
)
def test_each_option_replaces_its_own_part(options: list[str], field: str, expected: Any) -> None:
    said = LayerSettings(
        policy=SessionPolicy(max_events=3),
        hidden={"c"},
        conversations=Conversations(handle=["old"]),
        tasks=TaskPolicy(never=["x"]),
    )

    found = options_over(settings(*options), said)

    assert getattr(found, field) == expected
    others = {
        "policy",
        "hidden",
        "conversations",
        "tasks",
        "store",
        "security",
        "eras",
        "request_keys",
    }
    others -= {field}
    assert all(getattr(found, name) is getattr(said, name) for name in others)


@pytest.mark.parametrize("name", ["conversations", "tasks"])
def test_a_flag_that_is_a_variable_can_turn_off_what_the_file_has(name: str) -> None:
    said = LayerSettings(conversations=Conversations(), tasks=TaskPolicy())

    found = options_over(settings(environment={f"MCP_SESSIONS_{name.upper()}": "0"}), said)

    assert getattr(found, name) is None


def test_readable_state_wins() -> None:
    found = options_over(settings("--readable-state"), LayerSettings())

    assert "signing" in repr(found.security)


@pytest.fixture
def keys(here: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["keys", "add", "ci", "--file", "keys.json"]) == 0
    return capsys.readouterr().out.strip()


def test_a_layer_of_a_file_gets_api_keys(keys: str, here: Path) -> None:
    """As it is in the first tutorial: ``layer = SessionLayer(mcp)`` is in the file."""
    with serving(here, "app.py", "--api-keys", "keys.json") as process:
        lines = "".join(read_lines(process, 6))
        url = next(word for word in lines.split() if word.startswith("http://"))
        assert httpx2.post(url, json={}).status_code == 401
        known = httpx2.post(url, json={}, headers={"Authorization": f"Bearer {keys}"})
        assert known.status_code != 401


@pytest.mark.parametrize("target", ["made.py", "made.py:app"])
def test_a_layer_that_only_its_application_names_is_served(
    keys: str, here: Path, target: str
) -> None:
    """Otherwise its keys and its store would not count, and nothing would say so."""
    (here / "made.py").write_text(
        "from mcp.server import MCPServer\n"
        "from mcp_sessions import SessionLayer\n"
        "mcp = MCPServer('notes')\n"
        "app = SessionLayer(mcp, api_keys='keys.json', store='sqlite:///made.db').asgi_app()\n"
    )
    with serving(here, target) as process:
        lines = "".join(read_lines(process, 5))
        url = next(word for word in lines.split() if word.startswith("http://"))
        assert "SQLiteStore, as set in the SessionLayer" in lines
        assert httpx2.post(url, json={}).status_code == 401


def server() -> Any:
    return StdioServer(sys.executable, "-S", CHILD)


def test_a_layer_in_python_takes_api_keys(keys: str) -> None:
    assert SessionLayer(server(), api_keys="keys.json").authenticates
    assert SessionLayer(server(), api_keys=Path("keys.json")).authenticates
    assert not SessionLayer(server()).authenticates


def test_a_layer_in_python_takes_tokens_of_an_issuer() -> None:
    layer = SessionLayer(
        server(), auth_issuer="https://login.example.com", auth_audience="https://me.example.com"
    )

    assert layer.authenticates


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"api_keys": ""}, "api_keys is empty"),
        ({"api_keys": "none.json"}, "api_keys none.json"),
        ({"auth_issuer": "https://a.example"}, "auth_issuer and auth_audience go together"),
        ({"auth_scope": ["a"]}, "auth_scope needs api_keys, auth_issuer or auth"),
        ({"allow": ["*"]}, "allow needs auth PROVIDER"),
        ({"auth": "gitub", "allow": ["*"]}, "auth gitub: must be one of auth0,"),
        ({"auth": "github"}, "auth without allow would admit every user"),
    ],
)
def test_a_wrong_argument_is_named_as_an_argument(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError) as wrong:
        SessionLayer(server(), **given)

    assert str(wrong.value).startswith(said)


def test_two_ways_to_check_tokens_are_refused(keys: str) -> None:
    class Verifier:
        async def verify_token(self, token: str) -> None: ...

    with pytest.raises(ConfigurationError, match="a token verifier cannot be used with api_keys"):
        SessionLayer(server(), api_keys="keys.json", token_verifier=Verifier())


def test_a_provider_in_python_serves_the_path_of_its_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefix = "FASTMCP_SERVER_AUTH_GITHUB_"
    given = {
        "CLIENT_ID": "id",
        "CLIENT_SECRET": "secret",
        "BASE_URL": "https://me.example",
    }
    for name, value in given.items():
        monkeypatch.setenv(prefix + name, value)
    layer = SessionLayer(server(), auth="github", allow=["login:me"])

    paths = {getattr(route, "path", "") for route in layer.routes("/other")}

    assert "/.well-known/oauth-protected-resource/other" in paths, json.dumps(sorted(paths))


def test_the_layer_of_an_agent_follows_the_options_too(here: Path) -> None:
    (here / "agent.py").write_text(
        "from mcp_sessions.acp import AcpSessionLayer\n"
        "class Agent:\n"
        "    async def initialize(self): ...\n"
        "    async def prompt(self): ...\n"
        "layer = AcpSessionLayer(Agent(), store='sqlite:///of_the_file.db')\n"
        "other = AcpSessionLayer(Agent(), connect_timeout=3)\n"
    )
    with replacing(AGENT_REPLACED, {"store": "memory://"}):
        layer: Any = load_target("agent.py:layer", kinds=[lambda _: True])

    assert layer.store.name == "memory"


def test_several_options_win(checked: Checked) -> None:
    _, log = checked("--max-events", "5", "--store", "memory://")

    assert log == ["--store, --max-events win over the layer of app.py"]


def test_a_wrong_option_is_no_fault_of_the_file(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file can be imported, but its layer cannot be made with the option."""
    assert main(["serve", "app.py", "--api-keys", "none.json", "--port", "0"]) == 2

    said = capsys.readouterr().err
    assert said.startswith("mcp-sessions serve: --api-keys none.json: no such file")
    assert "app.py" not in said


def test_conversations_that_nobody_would_find_again_are_refused_by_their_reason(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MCP_SESSIONS_KEYS", raising=False)
    options = ["--conversations", "--store", "redis://127.0.0.1:1"]
    assert main(["serve", "app.py", *options, "--port", "0"]) == 2

    said = capsys.readouterr().err
    assert said.startswith("mcp-sessions serve: the sessions of conversations outlive this")
