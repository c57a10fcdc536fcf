"""Build a release: check it, build it, check it again, with checksums and a bill of materials.

    ./scripts/release                  # for a release: writes dist/
    ./scripts/release --check          # on any day: builds in a temporary folder
    ./scripts/release --check FOLDER   # and keeps the result there

A release needs a clean work tree, a version that has no tag yet, a dated section for it in
``CHANGELOG.md``, and the repository's addresses in ``pyproject.toml``. ``--check`` names what
of that is missing, and fails for all else.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Timer

from scripts.release_files import Wrong, check_files, run, tool, tracked

ROOT = Path(__file__).resolve().parent.parent
LINKS = ("Homepage", "Documentation", "Repository", "Issues", "Changelog")
"""The names that ``[project.urls]`` needs in a release."""

USES = """
from mcp.server import MCPServer
import mcp_sessions_transports
from mcp_sessions import SessionLayer, SQLiteStore, resumable
SessionLayer(MCPServer("notes"), store=SQLiteStore("sessions.sqlite")).asgi_app()
resumable("https://host/mcp", "wss://host/mcp")
"""
"""A program that runs with no extra installed."""

CALLS = """
import asyncio, json, sys
from mcp import Client
from mcp_sessions import resumable

async def main():
    url, tool, arguments = sys.argv[1:]
    async with Client(resumable(url)) as client:
        result = await client.call_tool(tool, json.loads(arguments))
    assert not result.is_error, result

asyncio.run(main())
"""
"""A program that calls a tool of the served command."""

EVERYTHING = ("npx", "-y", "@modelcontextprotocol/server-everything@2026.8.31")

_WITHIN = 240.0
"""Seconds after which a command that is served for a check is killed."""


def version_of(root: Path) -> str:
    text = (root / "mcp_sessions" / "__init__.py").read_text("utf-8")
    found = re.search(r'^__version__ = "(\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?)"$', text, re.MULTILINE)
    if found is None:
        raise Wrong("mcp_sessions/__init__.py: no __version__ such as 1.2.3 or 1.2.3rc1")
    return found[1]


def check_changelog(root: Path, version: str) -> list[str]:
    """Return the faults of ``CHANGELOG.md`` for a release.

    Raises:
        Wrong: Its first section is about another version, or is empty.
    """
    text = (root / "CHANGELOG.md").read_text("utf-8")
    headings = list(re.finditer(r"^## (.+)$", text, re.MULTILINE))
    if not headings:
        raise Wrong("CHANGELOG.md: no section")
    heading = headings[0]
    end = headings[1].start() if len(headings) > 1 else len(text)
    if not re.search(r"^- ", text[heading.end() : end], re.MULTILINE):
        raise Wrong(f"CHANGELOG.md: the section {heading[1]!r} has no entry")
    if heading[1] == f"Unreleased: {version}":
        return [f"CHANGELOG.md: make the heading '## {version} (YYYY-MM-DD)'"]
    if not re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", heading[1]):
        raise Wrong(f"CHANGELOG.md: the first section is {heading[1]!r}, the version {version}")
    return []


def missing_links(root: Path) -> list[str]:
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    absent = [link for link in LINKS if link not in project.get("urls", {})]
    return [f"pyproject.toml: add to [project.urls]: {', '.join(absent)}"] if absent else []


def missing_in_git(root: Path, version: str) -> list[str]:
    missing: list[str] = []
    if run("git", "status", "--porcelain", cwd=root):
        missing.append("git: commit your changes")
    if run("git", "tag", "--list", f"v{version}", cwd=root):
        missing.append(f"git: v{version} exists already, raise __version__")
    return missing


# --- what is built ----------------------------------------------------------------------


def build(root: Path, out: Path) -> tuple[Path, Path, Path]:
    """Build the sdist from the files that git has, the wheel from the sdist, and the wheel of the
    conformance runner.
    """
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-release-") as name:
        for file in tracked(root):
            (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / file, Path(name) / file)
        run(sys.executable, "-m", "build", "--outdir", str(out), name, cwd=out)
        runner = str(Path(name) / "conformance")
        run(sys.executable, "-m", "build", "--wheel", "--outdir", str(out), runner, cwd=out)
    [sdist] = out.glob("*.tar.gz")
    [wheel] = out.glob("mcp_sessions-*.whl")
    [runner_wheel] = out.glob("mcp_sessions_conformance-*.whl")
    return sdist, wheel, runner_wheel


def check_contents(root: Path, sdist: Path, *wheels: Path) -> None:
    """Check all for what PyPI refuses, and for what is not there or should not be.

    Raises:
        Wrong: The source distribution is not what git has, or a checker found something.
    """
    built = [str(sdist), *map(str, wheels)]
    run(sys.executable, "-m", "twine", "check", "--strict", *built, cwd=root)
    for wheel in wheels:
        settings = root / ("conformance" if "conformance" in wheel.name else "") / "pyproject.toml"
        run(tool("check-wheel-contents"), "--config", str(settings), str(wheel), cwd=root)
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()} - {"PKG-INFO"}
    wanted = set(tracked(root))
    if inside != wanted:
        raise Wrong(f"the sdist is not what git has: {sorted(inside ^ wanted)}")


def check_installed(distribution: Path, directory: Path, version: str) -> Path:
    """Install a distribution in an environment of its own and use it. Returns its Python.

    The environment has no pip, so it has nothing but the project and what that needs.
    """
    run(sys.executable, "-m", "venv", "--without-pip", str(directory), cwd=ROOT)
    python = directory / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-compile", str(distribution), cwd=directory)
    run(*pip, "check", cwd=directory)
    # From another folder and without the checkout: nothing but what was installed is found.
    said = run(str(directory / "bin" / "mcp-sessions"), "--version", cwd=directory)
    if said.split()[-1:] != [version]:
        raise Wrong(f"{distribution.name}: mcp-sessions --version says {said!r}, not {version}")
    run(str(python), "-I", "-c", USES, cwd=directory)
    check_served(directory)
    return python


def check_served(directory: Path) -> None:
    """Serve a command with what is installed, and call it.

    Raises:
        Wrong: It does not serve, or the call is not answered.
    """
    server = directory / "server.py"
    shutil.copy(ROOT / "tests" / "support" / "child_server.py", server)
    bin_directory = directory / "bin"
    command = str(bin_directory / "mcp-sessions"), sys.executable, "-I", str(server)
    check_call(bin_directory / "python", command[:1], command[1:], "count", {})


def check_uvx(wheel: Path, python: Path, directory: Path) -> None:
    """Serve a command by ``uvx --from WHEEL mcp-sessions serve -- npx -y PACKAGE``, and call it.
    Neither uv nor npm has anything yet.

    Args:
        python: One with the wheel, for the client.

    Raises:
        Wrong: It does not serve, or the call is not answered.
    """
    directory.mkdir()
    program = tool("uvx"), "--python", sys.executable, "--from", str(wheel), "mcp-sessions"
    own = ("UV_", "XDG_", "NPM_CONFIG_CACHE")
    kept = {name: it for name, it in os.environ.items() if not name.upper().startswith(own)}
    env = {**kept, "HOME": str(directory)}
    check_call(python, program, EVERYTHING, "echo", {"message": "a"}, env)


def check_call(
    python: Path,
    program: Sequence[str],
    served: Sequence[str],
    tool_name: str,
    arguments: Mapping[str, str],
    env: Mapping[str, str] | None = None,
) -> None:
    # npm downloads the server first.
    options = "--port", "0", "--log-format", "json", "--start-timeout", "3m"
    command = *program, "serve", *options, "--", *served
    process = subprocess.Popen(
        command,
        cwd=env["HOME"] if env is not None else python.parent,
        env=env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = Timer(_WITHIN, process.kill)
    watch.start()
    with process:
        try:
            lines = (re.search(r'"url": ?"([^"]+)"', line) for line in process.stderr or ())
            found = next(filter(None, lines), None)
            if found is None:
                raise Wrong(f"{served[0]} is not served")
            given = found[1], tool_name, json.dumps(arguments)
            run(str(python), "-I", "-c", CALLS, *given, cwd=python.parent)
        finally:
            process.terminate()
            watch.cancel()


def check_runner(wheel: Path, runner: Path, directory: Path) -> None:
    """Install both wheels, and list the vectors.

    Raises:
        Wrong: The base has the runner in it, or the two do not work together.
    """
    python = check_installed(wheel, directory, version_of(ROOT))
    command = str(directory / "bin" / "mcp-sessions")
    alone = subprocess.run([command, "conformance", "--list"], capture_output=True, text=True)
    if "pip install -e conformance" not in alone.stderr:
        raise Wrong(f"{wheel.name}: has the conformance runner in it")
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-compile", str(runner), cwd=directory)
    if "replay" not in run(command, "conformance", "--list", cwd=directory):
        raise Wrong(f"{runner.name}: names no vector")


def write_bill(python: Path, path: Path, version: str) -> None:
    """Write the software bill of materials of an environment, in CycloneDX.

    Raises:
        Wrong: It does not name the project, in this version.
    """
    # It does not look where a version comes from.
    project = python.parent / "pyproject.toml"
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    project.write_text(text.replace('dynamic = ["version"]', f'version = "{version}"'), "utf-8")
    run(
        *(sys.executable, "-m", "cyclonedx_py", "environment", str(python)),
        *("--pyproject", str(project), "--mc-type", "library"),
        *("--output-reproducible", "--output-file", str(path)),
        cwd=ROOT,
    )
    bill = json.loads(path.read_text("utf-8"))
    subject = bill["metadata"]["component"]
    if (subject["name"], subject.get("version")) != ("mcp-sessions", version):
        raise Wrong(f"{path.name}: is about {subject['name']} {subject.get('version')}")
    if len(bill.get("components", [])) < 10:
        raise Wrong(f"{path.name}: names {len(bill.get('components', []))} packages only")


def write_checksums(paths: Sequence[Path], path: Path) -> None:
    lines = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in paths]
    path.write_text("".join(lines), "utf-8")


def release(root: Path, out: Path, *, is_check: bool) -> None:
    """Check everything and fill ``out``, which is empty.

    Raises:
        Wrong: Something is not as it must be; the message says what.
    """
    say("version and changelog")
    version = version_of(root)
    missing = [
        *check_changelog(root, version),
        *missing_links(root),
        *missing_in_git(root, version),
    ]
    if missing and not is_check:
        raise Wrong("before a release:\n  " + "\n  ".join(missing))
    say("the project's files, each by its own tool")
    check_files(root)
    say("build")
    sdist, wheel, runner = build(root, out)
    say("what is in the sdist and the wheels")
    check_contents(root, sdist, wheel, runner)
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-release-") as name:
        say("the sdist in a clean environment")
        check_installed(sdist, Path(name) / "sdist", version)
        say("the wheel in a clean environment")
        python = check_installed(wheel, Path(name) / "wheel", version)
        say("the wheel by uvx, which has nothing yet, before a server by npx")
        check_uvx(wheel, python, Path(name) / "uvx")
        say("the wheel of the conformance runner beside it")
        check_runner(wheel, runner, Path(name) / "runner")
        say("bill of materials and checksums")
        bill = out / f"mcp_sessions-{version}.cdx.json"
        write_bill(python, bill, version)
    write_checksums([sdist, wheel, runner, bill], out / "SHA256SUMS")
    for path in sorted(out.iterdir()):
        print(f"  {path.name}  {path.stat().st_size} bytes")
    if missing:
        print("To do before a release:\n  " + "\n  ".join(missing))
    else:
        print(f"Next: git tag v{version}, then twine upload the sdist and the wheels.")


def say(step: str) -> None:
    print(f"== {step}", flush=True)


def main() -> int:
    """Make a release, or check that one could be made. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/release", description="Build what is published.")
    parser.add_argument("--check", action="store_true", help="on any day: tag, date may be missing")
    parser.add_argument("out", nargs="?", type=Path, help="a folder that is empty (else: dist)")
    arguments = parser.parse_args()
    is_check: bool = arguments.check
    with tempfile.TemporaryDirectory(prefix="mcp-sessions-release-") as temporary:
        out: Path = arguments.out or (Path(temporary) if is_check else ROOT / "dist")
        out.mkdir(parents=True, exist_ok=True)
        try:
            if any(out.iterdir()):
                raise Wrong(f"{out} is not empty")
            release(ROOT, out.resolve(), is_check=is_check)
        except Wrong as wrong:
            print(f"scripts/release: {wrong}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
