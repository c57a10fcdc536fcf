"""Times are written in one way, wherever a person writes one."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli import acp, bridge, conformance, keys, serve_options, sessions
from mcp_sessions.cli.arguments import OneLineParser, duration, seconds, shown
from mcp_sessions.cli.servers_file import servers_of
from mcp_sessions.errors import ConfigurationError

PARSERS = (acp, bridge, conformance, keys, serve_options, sessions)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("0.5", 0.5),
        (".5", 0.5),
        ("90s", 90),
        ("30m", 1_800),
        ("1.5h", 5_400),
        ("90d", 7_776_000),
        ("2w", 1_209_600),
    ],
)
def test_a_time_is_a_number_with_a_unit_or_seconds(text: str, expected: float) -> None:
    assert seconds(text) == duration(text) == expected


@pytest.mark.parametrize("text", ["", "m", "30 m", "30M", "-1", "1e3", "nan", "inf", "1h30m", "٣"])
def test_anything_else_is_no_time(text: str) -> None:
    for read in (seconds, duration):
        with pytest.raises(argparse.ArgumentTypeError, match="such as 30s"):
            read(text)


def test_only_some_times_may_be_0() -> None:
    assert duration("0") == duration("0s") == 0
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
        seconds("0m")


@pytest.mark.parametrize("time", [0, 0.1, 1, 4, 60, 90, 900, 1_800, 86_400, 2_592_000])
def test_a_default_is_shown_as_an_option_takes_it(time: float) -> None:
    assert duration(shown(time)) == time


def every_option() -> list[argparse.Action]:
    parsers: list[OneLineParser] = [module.make_parser() for module in PARSERS]
    for parser in parsers[:]:
        for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
            choices: Any = action.choices
            parsers += choices.values() if isinstance(choices, dict) else ()
    return [action for parser in parsers for action in parser.shown_options()]


def test_each_option_that_is_a_time_says_so_and_no_other_does() -> None:
    actions = every_option()

    times = {action.option_strings[-1] for action in actions if action.type in (seconds, duration)}
    said = {action.option_strings[-1] for action in actions if action.metavar == "TIME"}
    assert said == times
    assert {"--expires", "--age", "--last-wait", "--connect-timeout", "--grace"} < times


def servers(path: Path, **members: Any) -> Any:
    file = path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"one": {"command": "cat", **members}}}))
    return servers_of(str(file), {})["one"]


def test_a_file_of_servers_takes_the_same_times(tmp_path: Path) -> None:
    made = servers(tmp_path, childIdle="15m", startTimeout=20, tasks={"after": "3s", "ttl": "2h"})

    assert (made.child_idle, made.start_timeout) == (900, 20)
    assert (made.tasks.after, made.tasks.ttl) == (3, 7_200)


@pytest.mark.parametrize("name", ["childIdle", "startTimeout"])
@pytest.mark.parametrize("wrong", ["soon", True, [1], {}])
def test_a_wrong_time_in_a_file_is_named(tmp_path: Path, name: str, wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be a time, such as"):
        servers(tmp_path, **{name: wrong})


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"tasks": {"aftr": 1}}, "tasks has no aftr; did you mean after?"),
        ({"auth": {"scope": []}}, "no scope; did you mean scopes?"),
    ],
)
def test_a_member_that_is_nearly_right_gets_a_hint(
    tmp_path: Path, members: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError) as wrong:
        servers(tmp_path, **members)

    assert said in str(wrong.value)


def test_so_does_one_that_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    servers(tmp_path, maxChilds=1, comment="mine")

    assert "serve ignores comment, maxChilds; did you mean maxChildren?" in caplog.text
