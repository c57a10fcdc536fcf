import configparser
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

SETTINGS = {
    "charset": {"utf-8"},
    "end_of_line": {"lf"},
    "indent_style": {"space"},
    "insert_final_newline": {"true", "unset"},
    "trim_trailing_whitespace": {"true", "unset"},
    "indent_size": {"2", "4"},
    "max_line_length": {"100"},
}
"""The settings of ``.editorconfig`` that are checked here. A misspelt name is not in it."""


class Wrong(Exception):
    """Something is not as it must be. The message says what."""


def run(*command: str, cwd: Path) -> str:
    """Run a command and return what it printed.

    Raises:
        Wrong: It is not there, failed, or took 5 minutes. With what it printed.
    """
    try:
        done = subprocess.run(
            command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
        )
    except FileNotFoundError as absent:
        raise Wrong(f"{command[0]} is not there") from absent
    except subprocess.TimeoutExpired as expired:
        raise Wrong(f"{Path(command[0]).name} did not end in 300 s") from expired
    if done.returncode != 0:
        shown = " ".join([Path(command[0]).name, *command[1:]])
        raise Wrong(f"{shown} failed:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def tracked(root: Path) -> list[str]:
    return run("git", "ls-files", "-z", cwd=root).strip("\0").split("\0")


def check_files(root: Path) -> None:
    """Check the workflow, the hooks, the project's metadata, the shell scripts and all texts.

    Raises:
        Wrong: A tool found something, or could not run.
    """
    workflows = sorted(str(path) for path in (root / ".github" / "workflows").iterdir())
    schema = ("--builtin-schema", "vendor.github-workflows")
    run(tool("check-jsonschema"), *schema, *workflows, cwd=root)
    run(tool("zizmor"), "--offline", "--no-progress", "--strict-collection", *workflows, cwd=root)
    run(tool("pre-commit"), "validate-config", ".pre-commit-config.yaml", cwd=root)
    run(tool("validate-pyproject"), "pyproject.toml", cwd=root)
    run(tool("shellcheck"), "--external-sources", *shell_scripts(root), cwd=root)
    check_editorconfig(root)


def shell_scripts(root: Path) -> list[str]:
    names = [name for name in tracked(root) if name.startswith(("scripts/", ".ci/"))]
    return [name for name in names if (root / name).read_bytes().startswith(b"#!/usr/bin/env bash")]


def check_editorconfig(root: Path) -> None:
    """Check that ``.editorconfig`` says what editors know, and that each text keeps to it.

    Raises:
        Wrong: It says something else, or a text does not keep to it.
    """
    path = root / ".editorconfig"
    rules = configparser.ConfigParser(interpolation=None)
    rules.read_string("[top]\n" + path.read_text("utf-8"))
    if dict(rules["top"]) != {"root": "true"}:
        raise Wrong(".editorconfig: does not begin with root = true")
    for section in rules.sections()[1:]:
        for name, value in rules[section].items():
            if value not in SETTINGS.get(name, set()):
                raise Wrong(f".editorconfig: [{section}] says {name} = {value}")
    names = tracked(root)
    # It prints a heading for each file, if there are several.
    paths = [str(root / name) for name in names]
    said = configparser.RawConfigParser(delimiters="=")
    said.read_string(run(tool("editorconfig"), *paths, cwd=root))
    faults = [
        f"{name}: {fault}"
        for name in names
        for fault in faults_of((root / name).read_bytes(), said[str(root / name)])
    ]
    if faults:
        raise Wrong(".editorconfig:\n  " + "\n  ".join(faults))


def faults_of(content: bytes, wanted: Mapping[str, str]) -> list[str]:
    if b"\0" in content:  # no text
        return []
    found: list[str] = []
    if wanted.get("charset") == "utf-8" and content.decode("utf-8", "ignore").encode() != content:
        found.append("is not UTF-8")
    if wanted.get("end_of_line") == "lf" and b"\r" in content:
        found.append("has a carriage return")
    if wanted.get("insert_final_newline") == "true" and content and content[-1:] != b"\n":
        found.append("has no newline at its end")
    lines = content.split(b"\n")
    if wanted.get("trim_trailing_whitespace") == "true":
        found += [f"line {n} ends in space" for n, x in enumerate(lines, 1) if x != x.rstrip()]
    if wanted.get("indent_style") == "space":
        found += [f"line {n} begins with a tab" for n, x in enumerate(lines, 1) if x[:1] == b"\t"]
    return found
