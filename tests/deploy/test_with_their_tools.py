"""The files of ``deploy/``, looked at and run by the programs that they are for."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, image_environment, instructions, unit
from tests.support.processes import free_port, wait_until_it_listens
from tests.support.programs import system_program

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

ROOT = DEPLOY.parent
OF_THE_SYSTEM = ("apt-get update", "useradd ")
"""Beginnings of steps that would change this machine. All other steps run here."""


def run(command: list[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
        check=False,
        cwd=cwd,
        env=env,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


def test_systemd_finds_nothing_wrong_in_the_unit(tmp_path: Path) -> None:
    analyze = system_program("systemd-analyze", "systemd", "a Linux with systemd")
    file = tmp_path / "mcp-sessions.service"
    program = Path(sys.executable).parent / "mcp-sessions"
    file.write_text(unit().replace("/opt/mcp-sessions/bin/mcp-sessions", str(program)))
    assert run([analyze, "verify", "--man=no", str(file)]) == ""
    # Of 100. A unit without the lines of hardening has 96.
    security = ["security", "--offline=yes", "--threshold=20", "--no-pager"]
    assert "OK" in run([analyze, *security, str(file)])


def test_nginx_finds_nothing_wrong_in_its_files(tmp_path: Path) -> None:
    nginx = system_program("nginx", "nginx-light", "brew install nginx")
    for name in ("nginx.conf", "compose-nginx.conf"):
        said = run([nginx, "-t", "-q", "-c", str(DEPLOY / name), "-p", str(tmp_path)])
        assert said == "", name


def test_the_image_is_built_serves_is_healthy_and_stops(tmp_path: Path) -> None:
    """The steps of the Dockerfile in folders of this test, with the files that it copies."""
    source, position = tmp_path / "source", tmp_path / "opt"
    source.mkdir()
    local = tmp_path / "local"
    (local / "bin").mkdir(parents=True)
    node = Path(system_program("node", "nodejs", "brew install node"))
    npm = Path(os.path.realpath(system_program("npm", "npm", "brew install node"))).parents[2]
    (local / "bin" / "node").symlink_to(node)
    (local / "lib").mkdir()
    (local / "lib" / "node_modules").symlink_to(npm)
    steps = 0
    for name, rest in instructions():
        if name == "COPY" and not rest.startswith("--from"):
            *files, target = rest.split()
            for each in files:
                into = source / target
                if (ROOT / each).is_dir():
                    shutil.copytree(ROOT / each, into, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    shutil.copy(ROOT / each, into)
        elif name == "RUN" and not rest.startswith(OF_THE_SYSTEM):
            steps += 1
            here = rest.replace("/opt/mcp-sessions", str(position)).replace(
                "/usr/local", str(local)
            )
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            run(["sh", "-ec", here], cwd=source, env={**os.environ, "PATH": path})
    assert steps == 3
    run([str(local / "bin" / "npx"), "--version"])

    port = free_port()
    image = {**image_environment(), "MCP_SESSIONS_HOST": "127.0.0.1"}
    image |= {"MCP_SESSIONS_PORT": str(port), "PATH": f"{position}/bin:/usr/bin:/bin"}
    environment = {"HOME": str(tmp_path), **image}
    [entry] = [json.loads(rest) for name, rest in instructions() if name == "ENTRYPOINT"]
    [check] = [rest.partition(" CMD ")[2] for name, rest in instructions() if name == "HEALTHCHECK"]
    command = [*entry[2:], "--", f"{position}/bin/python", "-c", "input()"]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(
            command, executable=f"{position}/bin/mcp-sessions", env=environment, stderr=log, cwd="/"
        )
        try:
            wait_until_it_listens(server, port)
            run([f"{position}/bin/python", *json.loads(check)[1:]], env=environment)
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=30) == 0
        finally:
            server.kill()
            server.wait(timeout=30)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert lines[-1]["message"].startswith("stopped: "), "each line is JSON"
