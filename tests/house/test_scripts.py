"""``scripts/setup``, ``test`` and ``demo`` before they install anything."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import mutants

ROOT = Path(__file__).parents[2]
SCRIPTS = [
    *(ROOT / "scripts" / name for name in ("test", "demo", "docs", "release")),
    ROOT / ".ci" / "run",
]
BASH = shutil.which("bash") or "/bin/bash"

# What the scripts call besides Python; the rest of PATH is the test's.
TOOLS = ("cat", "cksum", "dirname", "grep", "mkdir", "rm")


def bash(code: str, *, path: Path | str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with ``scripts/setup`` sourced and nothing but ``path`` on PATH."""
    return subprocess.run(
        [BASH, "-c", f"set -euo pipefail\nsource {ROOT}/scripts/setup\n{code}"],
        cwd=cwd,
        env={"PATH": str(path), "HOME": str(cwd)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )


def command(directory: Path, name: str, *lines: str) -> None:
    """Put a shell script called ``name`` into ``directory``."""
    path = directory / name
    path.write_text("\n".join([f"#!{BASH}", *lines, ""]))
    path.chmod(0o755)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty PATH, but for the tools."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for tool in TOOLS:
        (directory / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    return directory


def works(directory: Path, name: str) -> None:
    command(directory, name, f'exec {sys.executable} "$@"')


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_and_parses(script: Path) -> None:
    assert script.stat().st_mode & 0o111
    done = subprocess.run([BASH, "-n", str(script)], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_the_newest_python_wins(path: Path) -> None:
    works(path, "python3.11")
    works(path, "python3.12")

    assert bash("find_python", path=path).stdout == "python3.12\n"


def test_a_command_that_exists_and_fails_is_passed_over(path: Path) -> None:
    """Version managers leave such commands on PATH for versions that are not switched on."""
    command(path, "python3.13", "echo 'command not found' >&2", "exit 127")
    works(path, "python3.11")

    assert bash("find_python", path=path).stdout == "python3.11\n"


def test_a_python_that_is_too_old_is_passed_over(path: Path) -> None:
    command(path, "python3", "exit 1")  # what the version check ends with

    done = bash("find_python", path=path)

    assert done.returncode == 1
    assert "No Python 3.11, 3.12 or 3.13 found" in done.stderr


def test_where_venv_is_missing_the_sentence_says_what_to_install(path: Path) -> None:
    """Debian and Ubuntu keep it in a package of its own."""
    command(
        path,
        "python3.12",
        'case "$2" in *ensurepip*) exit 1;; *) printf "python3.12-venv\\n";; esac',
    )

    done = bash("find_python", path=path)

    assert done.returncode == 1
    assert "sudo apt install python3.12-venv" in done.stderr


def test_an_environment_that_is_as_wanted_is_left_alone_and_needs_no_network(
    path: Path, tmp_path: Path
) -> None:
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    # Says no to pip, and to everything else that installing would need.
    command(environment / "bin", "python", 'case "$1" in -c) exit 0;; *) exit 1;; esac')
    stamped = f"install_stamp -e .[dev] >{environment}/.installed"

    done = bash(f"{stamped}; environment {environment} false -e '.[dev]'", path=path)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    directory = tmp_path / "checkout"
    (directory / "mcp_sessions").mkdir(parents=True)
    for name in ("pyproject.toml", "constraints-lowest.txt", "mcp_sessions/__init__.py"):
        shutil.copy(ROOT / name, directory / name)
    return directory


def test_the_demo_uses_the_environment_of_the_tests_if_it_is_there(
    path: Path, checkout: Path
) -> None:
    (checkout / ".venv" / "bin").mkdir(parents=True)
    command(checkout / ".venv" / "bin", "python", "exit 0")
    stamped = "install_stamp -e '.[dev]' >.venv/.installed"

    done = bash(f"{stamped}; set_up_demo; echo $demo_python", path=path, cwd=checkout)

    assert (done.returncode, done.stdout, done.stderr) == (0, ".venv/bin/python\n", "")


def test_a_bar_counts_the_packages_that_pip_has_and_errors_stay(path: Path) -> None:
    (path / "awk").symlink_to(shutil.which("awk") or "/usr/bin/awk")
    said = (
        "Collecting a",
        "  Downloading a-1.whl.metadata (1 kB)",
        "  Downloading a-1.whl (9 kB)",
        "Collecting b",
        "ERROR: no b",
        "Installing collected packages: a",
    )

    done = bash(f"packages=4; printf '%s\\n' {shlex.join(said)} | draw_progress", path=path)

    drawn = [line.strip() for line in done.stdout.replace("\x1b[K", "").splitlines() if line]
    assert drawn == [
        f"[{'.' * 24}] 0 packages, next: a",
        f"[{'#' * 6}{'.' * 18}] 1 packages",
        f"[{'#' * 6}{'.' * 18}] 1 packages, next: b",
        "ERROR: no b",
        f"[{'#' * 24}] installing 2 packages",
    ]


def test_else_the_demo_installs_what_it_needs_and_nothing_else(path: Path, checkout: Path) -> None:
    """It shows each step with the seconds so far. The second time there is nothing to do."""
    command(
        path,
        "python3.13",
        'case "$*" in',
        '*"-m venv"*) for dir; do :; done; mkdir -p "$dir/bin"; ln -s "$0" "$dir/bin/python" ;;',
        '*"pip "*) echo "$*" >>pip.log ;;',
        "-V) echo Python 3.13.0 ;;",
        "esac",
    )
    (path / "ln").symlink_to(shutil.which("ln") or "/bin/ln")

    first = bash("set_up_demo; echo $demo_python", path=path, cwd=checkout)
    second = bash("set_up_demo; echo $demo_python", path=path, cwd=checkout)

    assert (first.returncode, first.stdout) == (0, ".cache/venvs/demo/bin/python\n"), first.stderr
    assert [line.split("s  ")[1] for line in first.stderr.splitlines()[1:]] == [
        "Making a virtual environment with Python 3.13.0.",
        "Installing the newest pip.",
        "Downloading and installing: --no-compile -e .[demo]",
        "Installed.",
    ]
    assert (second.stdout, second.stderr) == (first.stdout, "")
    pip, demo = (checkout / "pip.log").read_text().splitlines()
    assert "install --no-compile --upgrade pip" in pip
    assert "install --no-compile -e .[demo]" in demo
    assert not (checkout / ".venv").exists()


def test_an_installation_that_fails_stops_the_demo_and_is_taken_up_again(
    path: Path, checkout: Path
) -> None:
    command(
        path,
        "python3.13",
        'case "$*" in *"pip "*install*) exit 1 ;; -V) echo Python 3.13.0 ;; esac',
    )

    done = bash("set_up_demo; echo $demo_python", path=path, cwd=checkout)

    assert done.returncode == 1
    assert done.stdout == ""
    assert not list(checkout.rglob(".installed"))


def test_a_change_of_what_is_installed_changes_the_stamp(path: Path, tmp_path: Path) -> None:
    for name in ("pyproject.toml", "constraints-lowest.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "mcp_sessions").mkdir()
    version = tmp_path / "mcp_sessions" / "__init__.py"
    version.write_text('__version__ = "1.0.0"\n')

    def stamp() -> str:
        done = bash("install_stamp -e .", path=path, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = stamp()
    assert first.startswith(f"{tmp_path} ")
    assert stamp() == first
    version.write_text('"""Only the version counts."""\n__version__ = "1.0.0"\n')
    assert stamp() == first
    version.write_text('__version__ = "1.0.1"\n')
    second = stamp()
    assert second != first
    project = tmp_path / "pyproject.toml"
    project.write_text(f"{project.read_text()}# changed\n")
    assert stamp() not in {first, second}


@pytest.mark.parametrize("argument", ["--help", "--everything"])
def test_scripts_test_explains_itself_without_setting_up(argument: str, path: Path) -> None:
    done = subprocess.run(
        [BASH, str(ROOT / "scripts" / "test"), argument],
        env={"PATH": str(path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
    )

    assert done.returncode == (0 if argument == "--help" else 2)
    assert "usage: scripts/test [--all]" in done.stdout + done.stderr


# --- a Redis server -----------------------------------------------------------------------


def find_redis(path: Path, tmp_path: Path, *, is_debian: bool) -> subprocess.CompletedProcess[str]:
    """Run ``find_redis`` as root of a Debian, or of something else."""
    command(path, "id", "echo 0")
    release = tmp_path / "debian_version"
    if is_debian:
        release.touch()
    return bash(f"debian_release={release}; find_redis", path=path)


@pytest.mark.parametrize("program", ["redis-server", "valkey-server"])
def test_a_redis_or_a_valkey_on_path_is_taken_as_it_is(
    program: str, path: Path, tmp_path: Path
) -> None:
    command(path, program, f"echo {program} v=7.0.15")
    command(path, "apt-get", "exit 1")

    done = find_redis(path, tmp_path, is_debian=True)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{program} v=7.0.15\n"


def test_root_on_debian_gets_one_installed_and_is_notified_first(
    path: Path, tmp_path: Path
) -> None:
    shutil.copy(shutil.which("chmod") or "/bin/chmod", path)
    command(
        path,
        "apt-get",
        'echo "apt-get $*" >&2',
        f"printf '#!{BASH}\\necho installed' >{path}/redis-server",
        f"chmod +x {path}/redis-server",
    )

    done = find_redis(path, tmp_path, is_debian=True)

    assert (done.returncode, done.stdout) == (0, "installed\n")
    said, did = done.stderr.splitlines()
    assert "installing" in said and "--no-redis" in said
    assert did.startswith("apt-get install") and did.endswith("redis-server")


@pytest.mark.parametrize("is_debian", [False, True])
def test_where_there_is_none_the_sentence_says_what_to_install(
    is_debian: bool, path: Path, tmp_path: Path
) -> None:
    if is_debian:
        command(path, "apt-get", "exit 100")

    done = find_redis(path, tmp_path, is_debian=is_debian)

    assert done.returncode == 1
    for hint in ("sudo apt install redis-server", "brew install redis", "--no-redis"):
        assert hint in done.stderr


OPTIONS = {
    "demo": ROOT / "scripts" / "demo.py",
    "walk": ROOT / "scripts" / "walks.py",
    "release": ROOT / "scripts" / "release.py",
    "simulate": ROOT / "tests" / "simulation" / "__main__.py",
    "campaign": ROOT / "tests" / "campaign" / "__main__.py",
    "mutate": ROOT / "scripts" / "mutants.py",
    "docs": None,
    "test": None,
}
"""Script → the file that reads its options. None: the script itself does."""


@pytest.mark.parametrize("name", OPTIONS)
def test_each_script_answers_help_before_it_installs_anything(name: str, path: Path) -> None:
    """Its help names each option."""
    done = subprocess.run(
        [BASH, ROOT / "scripts" / name, "--help"],
        env={"PATH": str(path), "HOME": str(path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: scripts/{name}")
    file = OPTIONS[name]
    options = re.findall(r'add_argument\(\s*"(--[a-z-]+)"', file.read_text("utf-8")) if file else []
    assert [option for option in options if option not in done.stdout] == []


def test_no_script_is_forgotten() -> None:
    """Each file that a user runs."""
    files = (ROOT / "scripts").iterdir()
    run = {file.name for file in files if file.is_file() and file.stat().st_mode & 0o111}
    assert run == OPTIONS.keys()


PASSES = """
import sys
from scripts.mutants import ROOT, Mutant, passes

print(passes(Mutant(ROOT / "mcp_sessions" / "core" / "backoff.py", 0), [sys.argv[1]], 50))
"""


@pytest.mark.parametrize(("mark", "noticed"), [("", True), ("@pytest.mark.full", False)])
def test_what_does_not_run_notices_no_change_of_the_code(
    mark: str, noticed: bool, tmp_path: Path
) -> None:
    """All tests of a file may be long ones. Then it was taken for one that fails."""
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest\n{mark}\ndef test_it():\n    raise AssertionError\n")
    command = [sys.executable, "-c", PASSES, str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == str(not noticed), done.stderr


def test_a_change_of_a_store_meets_the_contract() -> None:
    """It is over every store, in no store's own folder. Without it, a wrong store was unnoticed."""
    module = ROOT / "mcp_sessions" / "stores" / "memory" / "memory_store.py"
    assert mutants.tests_of(module)[-1] == ["tests/stores/test_contract.py"]
