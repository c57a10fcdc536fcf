"""Each tutorial is done word for word: its files, its commands, and what they print."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.tutorial import Reader, path_of_this_python, steps
from tests.support.nginx import CONFIG
from tests.support.processes import free_port
from tests.support.redis_server import binary

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
FIRST = "first-session"
SHORT = (FIRST, "fastmcp-state", "reconnecting-client", "acp-agent")
"""By default the first alone: they start Python 18 times, as a reader does, for 2 s of CPU each."""

LONG = ("other-language", "replicas")
"""What needs more than PyPI has a test of its own."""


def page(name: str) -> str:
    return (TUTORIALS / f"{name}.md").read_text("utf-8")


def reader(folder: Path) -> Reader:
    """One with the examples of the checkout at hand, and its environment switched on."""
    shutil.copytree(ROOT / "examples", folder / "examples", ignore=shutil.ignore_patterns("*.db"))
    port = str(free_port())
    path = f"{path_of_this_python()}{os.pathsep}{folder / 'bin'}"
    return Reader(folder, {"PATH": path, "MCP_SESSIONS_PORT": port}, {"8000": port})


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] if name != FIRST else []) for name in SHORT],
)
def test_a_tutorial_does_what_it_says(name: str, tmp_path: Path) -> None:
    reader(tmp_path).expect_what_it_says(page(name))


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_tutorial_of_another_language(tmp_path: Path) -> None:
    """It needs npm, and the network once."""
    reader(tmp_path).expect_what_it_says(page("other-language"))


@pytest.mark.full
@pytest.mark.redis
@pytest.mark.timeout(300)
def test_the_tutorial_of_three_replicas(tmp_path: Path) -> None:
    """The configuration of nginx has the test's ports. Without a Redis, a Valkey has its name."""
    does = reader(tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "redis-server").symlink_to(binary())
    configuration = CONFIG.read_text("utf-8")
    for port in ("8001", "8002", "8003", "8080"):
        configuration = configuration.replace(f":{port}", f":{does.port(port)}")
    # As root nginx works as another user, who may not enter a temporary folder.
    user = "user root;\n" if os.geteuid() == 0 else ""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "nginx.conf").write_text(user + configuration, "utf-8")
    does.expect_what_it_says(page("replicas"))


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_installation_of_the_first_tutorial(tmp_path: Path) -> None:
    """In a copy of the checkout, with the commands of the page."""
    copied = ("mcp_sessions", "transports", "conformance", "pyproject.toml", "README.md", "LICENSE")
    for name in copied:
        source, target = ROOT / name, tmp_path / name
        _ = shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    install = next(step.code for step in steps(page("first-session")) if step.language == "sh")

    done = subprocess.run(
        ["bash", "-euc", f"{install}\nmcp-sessions --version"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-3_000:]
    assert (tmp_path / ".venv" / "bin" / "mcp-sessions").exists()


def test_every_tutorial_is_done() -> None:
    assert {path.stem for path in TUTORIALS.glob("*.md")} == {*SHORT, *LONG}


@pytest.mark.parametrize(
    "text",
    [
        "Run it:\n\n```sh\necho one\n```\n\nYou see:\n\n```text\ntwo\n```\n",
        "Run it:\n\n```sh\nexit 3\n```\n",
    ],
)
def test_a_tutorial_that_does_something_else_is_seen(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.docs.tutorial.WITHIN", 0.5)
    with pytest.raises(AssertionError):
        Reader(tmp_path, {}).expect_what_it_says(text)


def test_a_file_is_written_and_a_command_is_left_running(tmp_path: Path) -> None:
    text = """```python
# hello.py
print("hello", "there")
```

Start it in terminal 1, and leave it
running:

```sh
python hello.py && exec sleep 30
```

```text
hel…there
```

Press Ctrl+C in terminal 1.
"""
    does = Reader(tmp_path, {"PATH": path_of_this_python()})
    does.expect_what_it_says(text)

    assert does.terminals == {}
