"""Loading TARGET, with a server class of our own: what a target is, not what a server is."""

import re
import sys
from collections.abc import Generator
from pathlib import Path
from textwrap import dedent

import pytest

from mcp_sessions.cli.targets import load_target, split_target
from mcp_sessions.errors import ConfigurationError

SERVER = """
class Server:
    def __init__(self, name: str) -> None:
        self.name = name
class Layer(Server): ...
"""


def is_server(value: object) -> bool:
    return type(value).__name__ == "Server"


def is_layer(value: object) -> bool:
    return type(value).__name__ == "Layer"


def load(target: str | Path) -> str:
    server = load_target(str(target), kinds=(is_layer, is_server))
    return vars(server)["name"]


def refusal(target: str | Path) -> str:
    """Why ``target`` cannot be loaded: one line."""
    with pytest.raises(ConfigurationError) as refused:
        load(target)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """An empty current directory; the interpreter forgets what a test imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(SERVER + dedent(code))
    return path


SPLIT = {
    "app:mcp": ("app", "mcp"),
    "pkg.app:mcp": ("pkg.app", "mcp"),
    "pkg.app:holder.mcp": ("pkg.app", "holder.mcp"),
    "app.py": ("app.py", None),
    "some where/my-app.py:mcp": ("some where/my-app.py", "mcp"),
    "/srv/app.py:mcp": ("/srv/app.py", "mcp"),
    "C:\\app.py": ("C:\\app.py", None),
    "C:\\app.py:mcp": ("C:\\app.py", "mcp"),
}


@pytest.mark.parametrize(("target", "parts"), SPLIT.items(), ids=list(SPLIT))
def test_a_target_is_a_module_or_a_file_and_perhaps_an_attribute(
    target: str, parts: tuple[str, str | None]
) -> None:
    assert split_target(target) == parts


@pytest.mark.parametrize(
    "target", ["", "app", "pkg.app", "app:", ":mcp", "app.py:", "app:0", "dir/app:mcp"]
)
def test_anything_else_is_refused_and_notified_the_shape(target: str) -> None:
    assert refusal(target) == (
        f"TARGET must be package.module:attr or file.py[:attr], not {target!r}"
    )


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("a b:mcp", "; write a command after --, without quotes: -- a ..."),
        ("a b", "; write a command after --, without quotes: -- a ..."),
        ("127.0.0.1:80/mcp", "did you mean http://127.0.0.1:80/mcp?"),
        ("host.example/mcp", "did you mean https://host.example/mcp?"),
        ("[::1]:80", "did you mean http://[::1]:80?"),
        ("mcp.json", "; a file of servers is --config mcp.json"),
        ("server.ts", "; a server in another language is a command: -- COMMAND [ARG ...]"),
    ],
)
def test_what_was_meant_instead_is_said(target: str, hint: str) -> None:
    assert refusal(target).endswith(hint)


def test_a_module_without_an_attribute_that_is_a_file_here_is_meant_as_a_file(here: Path) -> None:
    (here / "notes_server.py").touch()
    assert refusal("notes_server").endswith("; did you mean notes_server.py?")


TWO = "one, two = Server('one'), Server('two')"
WRAPPED = "mcp = Server('bare')\nlayer = Layer('wrapped')"


@pytest.mark.parametrize(
    ("code", "target", "name"),
    [
        (TWO, "app.py:two", "two"),
        (TWO, "app.py:one", "one"),
        ("class Holder: mcp = Server('held')", "app.py:Holder.mcp", "held"),
        # Without an attribute the only server is taken.
        ("_private = Server('private')\nmcp = also_mcp = Server('only')\nn = 1", "app.py", "only"),
        # A layer comes before the server that it wraps.
        (WRAPPED, "app.py", "wrapped"),
        (WRAPPED, "app.py:mcp", "bare"),
        # What is guarded does not run.
        ("mcp = Server('mcp')\nif __name__ == '__main__': raise SystemExit", "app.py", "mcp"),
    ],
)
def test_a_server_is_found_in_a_file(here: Path, code: str, target: str, name: str) -> None:
    write(here / "app.py", code)

    assert load(target) == name
    assert load(here / target) == name


SEVERAL = "app.py has several servers; name one: app.py:one, app.py:two"


@pytest.mark.parametrize(
    ("code", "target", "said"),
    [
        (TWO, "app.py", SEVERAL),
        ("mcp, one, two = Server('bare'), Layer('one'), Layer('two')", "app.py", SEVERAL),
        (
            "n = 1",
            "app.py",
            "app.py has nothing to serve: "
            "it needs an MCP server (MCPServer, lowlevel Server, FastMCP) or a SessionLayer",
        ),
        (
            "mcp = Server('mcp')",
            "app.py:app",
            "app.py has no attribute 'app'; what it has to serve: mcp",
        ),
        ("mcp = {}", "app.py:mcp", "app.py:mcp is a dict, not an MCP server..."),
        (
            "def fail():\n    raise ValueError('two\\nlines')\nfail()",
            "app.py",
            "app.py cannot be imported: ValueError: two lines (HERE/app.py, line 7)",
        ),
        # A wrong setting of the layer: the line is the one to change.
        (
            "from mcp_sessions import SessionLayer\nSessionLayer(Server('s'))",
            "app.py",
            "a Server cannot be wrapped: ... (HERE/app.py, line 7)",
        ),
        ("mcp = = 1", "app.py", "...SyntaxError: invalid syntax (app.py, line 6)"),
        (
            "raise SystemExit(0)",
            "app.py",
            "...put what it runs under: if __name__ == '__main__'...",
        ),
    ],
)
def test_a_file_without_the_server_is_refused_with_what_is_there(
    here: Path, code: str, target: str, said: str
) -> None:
    """``...`` stands for any other words, and ``HERE`` for the directory."""
    write(here / "app.py", code)

    pattern = re.escape(said.replace("HERE", str(here))).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, refusal(target))


def test_a_module_is_found_in_the_current_directory(here: Path) -> None:
    (here / "notes_pkg").mkdir()
    write(here / "notes_pkg" / "app.py", "mcp = Server('packaged')")

    assert load("notes_pkg.app:mcp") == "packaged"


def test_a_missing_file_and_a_missing_module(here: Path) -> None:
    assert refusal("nowhere.py") == "no such file: nowhere.py"
    assert refusal("nowhere.app:mcp") == (
        "no module named 'nowhere' here or among the installed packages"
    )


def test_a_module_that_the_target_misses_is_not_reported_as_the_target(here: Path) -> None:
    write(here / "lacking.py", "import nowhere")

    sentence = refusal("lacking:mcp")

    assert sentence.startswith("lacking cannot be imported: ModuleNotFoundError: No module named")
    assert f"({here / 'lacking.py'}, line 6); if another environment" in sentence
    assert sentence.endswith(" other-venv/bin/python -m lacking")


def test_a_file_finds_its_neighbours_and_they_find_the_same_file(here: Path) -> None:
    """A second copy of the file would be a second server, and the tools on the wrong one."""
    write(here / "inner" / "my_app.py", "mcp = Server('plain')\nimport my_tools")
    (here / "inner" / "my_tools.py").write_text("from my_app import mcp\nmcp.name = 'extended'\n")

    assert load("inner/my_app.py") == "extended"


@pytest.mark.parametrize("name", ["json", "my-app", "mcp_sessions"])
def test_a_file_may_have_a_name_that_is_taken_or_no_module_s(name: str, here: Path) -> None:
    taken = sys.modules.get(name)
    write(here / f"{name}.py", "mcp = Server('mine')")

    assert load(f"{name}.py") == "mine"
    assert sys.modules.get(name) is taken


def test_a_file_that_failed_can_be_loaded_again_once_it_is_right(here: Path) -> None:
    write(here / "app.py", "raise RuntimeError")
    refusal("app.py")
    write(here / "app.py", "mcp = Server('right')  # another size, so not from the cache")

    assert load("app.py") == "right"


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("mcp.json", "; a file of servers is --config mcp.json"),
        ("server.js", "; a server in another language is a command: -- COMMAND [ARG ...]"),
        ("@scope/server", "; a server in another language is a command: -- COMMAND [ARG ...]"),
    ],
)
def test_what_is_served_otherwise_is_said(target: str, hint: str) -> None:
    assert refusal(target).endswith(hint)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("from mcp.server.fastmcp import FastMCP", "it was written for mcp<2"),
        ("from mcp.server.lowlevel import NoSuchName", "it was written for mcp<2"),
        (
            "from mcp.server import Server\n@Server('old').list_tools()\ndef tools(): ...",
            "it was written for mcp<2",
        ),
        ("import no_such_package", "another environment has what it needs"),
    ],
)
def test_a_server_for_another_environment_is_reported_how_it_is_served(
    here: Path, code: str, why: str
) -> None:
    """A command speaks MCP, whatever its packages are."""
    write(here / "old.py", code)

    said = refusal("old.py")

    assert f"; if {why}, serve it as a command" in said
    assert said.endswith(": mcp-sessions serve -- other-venv/bin/python old.py")


def test_a_mistake_of_its_own_needs_no_other_environment(here: Path) -> None:
    write(here / "old.py", "class A: ...\nA.b")
    assert "other-venv" not in refusal("old.py")
