"""The help of each command: options in groups, one line for each, and examples at the end."""

import argparse
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mcp_sessions.cli import (
    acp,
    bridge,
    config,
    conformance,
    dashboard,
    keygen,
    keys,
    main,
    serve_options,
    sessions,
    store,
)
from mcp_sessions.cli.arguments import OneLineParser
from mcp_sessions.policy import LIMITS

ROOT = Path(__file__).parents[2]

MAKERS = {
    "serve": serve_options.make_parser,
    "bridge": bridge.make_parser,
    "acp": acp.make_parser,
    "config": config.make_parser,
    "dashboard": dashboard.make_parser,
    "conformance": conformance.make_parser,
    "keys": keys.make_parser,
    "keygen": keygen.make_parser,
    "sessions": sessions.make_parser,
    "store": store.make_parser,
}


def parsers() -> list[OneLineParser]:
    """Each command's parser, and those of its sub-commands."""
    made = [make() for make in MAKERS.values()]
    below: list[OneLineParser] = []
    for parser in made:
        for action in parser._actions:  # pyright: ignore[reportPrivateUsage]
            choices: Any = action.choices
            below += choices.values() if isinstance(choices, dict) else ()
    return [*made, *below]


every_parser = pytest.mark.parametrize("parser", parsers(), ids=lambda parser: parser.prog)


def options_of(parser: OneLineParser, monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = parser.format_help().splitlines()
    return [line for line in lines[lines.index("options:") :] if line.startswith("  -")]


@every_parser
def test_the_help_of_an_option_has_one_line_in_a_small_terminal(
    parser: OneLineParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = options_of(parser, monkeypatch, 80)

    assert narrow == options_of(parser, monkeypatch, 300)


@pytest.mark.parametrize("parser", [*parsers(), main._parser()], ids=lambda parser: parser.prog)  # pyright: ignore[reportPrivateUsage]
def test_no_line_of_the_help_is_wider_than_80_columns(
    parser: OneLineParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")

    assert [line for line in parser.format_help().splitlines() if len(line) > 80] == []


@every_parser
def test_each_option_is_in_a_group_and_says_what_it_does(parser: OneLineParser) -> None:
    general, *groups = (
        group
        for group in parser._action_groups  # pyright: ignore[reportPrivateUsage]
        if group.title != "positional arguments"
    )
    grouped = [each for group in groups for each in group._group_actions]  # pyright: ignore[reportPrivateUsage]

    assert general.title == "options"
    assert [each.dest for each in parser.shown_options() if each not in grouped] == []
    assert [each.dest for each in grouped if not each.help] == []


def test_an_option_that_the_help_leaves_out_is_in_the_documentation() -> None:
    """The help of ``serve`` has what most servers need."""
    parser = serve_options.make_parser()
    names = [each.option_strings[-1] for each in parser.shown_options()]
    listed = [name for name in names if re.search(rf"^ +{name}\b", parser.format_help(), re.M)]
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    # The page of the limits has their names in Python.
    limits = {f"--{each.replace('_', '-')}" for each in LIMITS if f"`{each}`" in pages}

    assert len(listed) <= 40
    assert [
        name for name in names if name not in listed and name not in pages and name not in limits
    ] == []


@every_parser
def test_the_help_ends_with_examples_that_the_command_accepts(
    parser: OneLineParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY", "a-key")
    examples = parser.format_help().partition("\nexamples:\n")[2]
    lines = examples.splitlines()

    assert lines
    for line in lines:
        program, name, *arguments = shlex.split(os.path.expandvars(line))
        assert program == "mcp-sessions"
        accepted = (
            serve_options.parsed(arguments, {})
            if name == "serve"
            else MAKERS[name]().parse_args(arguments)
        )
        assert isinstance(accepted, argparse.Namespace)
