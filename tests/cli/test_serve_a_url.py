"""``mcp-sessions serve URL``: a server somewhere else, by its address alone."""

import re
import signal
import sys
from pathlib import Path

import pytest

from mcp_sessions.cli.arguments import expanded
from mcp_sessions.cli.main import main
from mcp_sessions.cli.serve_options import parsed
from mcp_sessions.cli.settings_from_options import external_server
from mcp_sessions.errors import ConfigurationError
from tests.support.children import CHILD
from tests.support.serving import initialize, read_lines, serving


def address(said: str) -> str:
    found = re.search(r"^  at +(http://127\.0\.0\.1:\d+/mcp)$", said, re.M)
    assert found is not None, said
    return found[1]


def test_a_url_is_served_here_one_of_this_command_too(tmp_path: Path) -> None:
    with serving(tmp_path, "--", sys.executable, "-S", CHILD) as upstream:
        url = address(read_lines(upstream, 5))
        given = ("--per", "shared", "--header", "X-Key: ${HOME:-none}", f"{url}?key=secret")
        with serving(tmp_path, *given) as process:
            said = read_lines(process, 5)
            assert f"serves {url}\n" in said and "secret" not in said
            assert initialize(address(said))["serverInfo"] == {
                "name": "child",
                "version": "1",
                "ofAnotherKind": True,
            }
            process.send_signal(signal.SIGTERM)
            process.wait(20)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["http://"], "'http://' is not a whole address, such as http://host/mcp"),
        (["htp://me:secret@x/mcp?k=secret"], "'htp://x/mcp': an address begins with http:// or "),
        (["htps://x"], "did you mean https://x?"),
        (["http:/x"], "did you mean http://x?"),
        (["ws://x/mcp"], "an address begins with http:// or https://"),
        (["127.0.0.1:8633/mcp"], "did you mean http://127.0.0.1:8633/mcp?"),
        (["localhost:8633"], "did you mean http://localhost:8633?"),
        (["me:secret@mcp.example.com/mcp?k=secret"], "did you mean https://mcp.example.com/mcp?"),
        (["https://me:secret@host/mcp"], "the URL has credentials in it"),
        (["--env", "A=1", "https://host/mcp"], "--env is only for -- COMMAND"),
        (["--header", "A: 1", "app.py"], "--header is only for a URL"),
        (["--child-idle", "3", "app.py"], "--child-idle is only for -- COMMAND, a URL or --config"),
    ],
)
def test_what_is_wrong_with_a_url_is_one_line_at_once(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "secret" not in error


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("secret", "must be 'NAME: VALUE'"),
        ("A: ${NOT_SET_HERE}", "the variable NOT_SET_HERE is not set"),
    ],
)
def test_a_header_that_is_none_is_one_line(
    header: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--header", header, "https://host/mcp"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and "secret" not in error


@pytest.mark.parametrize("second", ["X", "x"])
def test_a_header_that_is_given_twice_is_refused(second: str) -> None:
    """The first value was lost in silence."""
    headers = ["--header", "X: secret", "--header", f"{second}: secret"]
    options = parsed([*headers, "https://host/mcp"], {})
    with pytest.raises(ConfigurationError, match="is there twice: give it once") as refused:
        external_server(options)
    assert "secret" not in str(refused.value)


def test_variables_of_the_environment_are_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "${B}")
    assert expanded("a${HERE}b${env:HERE}c${NOT_SET:-d}e$f{g}") == "a${B}b${B}cde$f{g}"
    assert expanded("${NOT_SET:-}") == ""
    assert expanded("$${HERE}{g}") == "$${B}{g}"
    with pytest.raises(ConfigurationError, match="NOT_SET is not set"):
        expanded("${NOT_SET}")
