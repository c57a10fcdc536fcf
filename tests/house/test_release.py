"""``scripts/release``: what it refuses, and in ``--all`` that a release could be made today."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from mcp_sessions import __version__
from scripts.release import check_changelog, missing_in_git, missing_links, version_of
from scripts.release_files import Wrong, check_editorconfig, check_files, faults_of

ROOT = Path(__file__).parents[2]
TEXT = {
    "charset": "utf-8",
    "end_of_line": "lf",
    "indent_style": "space",
    "insert_final_newline": "true",
    "trim_trailing_whitespace": "true",
}


def changelog(root: Path, *sections: str) -> Path:
    """A folder whose CHANGELOG.md has these sections."""
    (root / "CHANGELOG.md").write_text("# Changelog\n\n" + "\n".join(sections), "utf-8")
    return root


# --- version and changelog --------------------------------------------------------------------


def test_the_version_is_the_one_that_is_imported() -> None:
    assert version_of(ROOT) == __version__


@pytest.mark.parametrize("line", ["", '__version__ = "1.0"\n', '__version__ = "1.0.0-beta"\n'])
def test_a_version_that_pypi_writes_otherwise_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "mcp_sessions").mkdir()
    (tmp_path / "mcp_sessions" / "__init__.py").write_text(line)

    with pytest.raises(Wrong, match="no __version__"):
        version_of(tmp_path)


def test_a_dated_section_of_this_version_lacks_nothing(tmp_path: Path) -> None:
    root = changelog(tmp_path, "## 1.2.3 (2026-11-26)\n\n- One.\n", "## 1.2.2 (2026-11-01)\n")

    assert check_changelog(root, "1.2.3") == []


def test_an_unreleased_section_of_this_version_lacks_its_date(tmp_path: Path) -> None:
    root = changelog(tmp_path, "## Unreleased: 1.2.3\n\n- One.\n")

    assert check_changelog(root, "1.2.3") == [
        "CHANGELOG.md: make the heading '## 1.2.3 (YYYY-MM-DD)'"
    ]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ((), "no section"),
        (("## 1.2.3 (2026-11-26)\n", "## 1.2.2 (2026-11-01)\n\n- One.\n"), "has no entry"),
        (("## 1.2.2 (2026-11-26)\n\n- One.\n",), "the version 1.2.3"),
        (("## Unreleased: 1.2.4\n\n- One.\n",), "the version 1.2.3"),
    ],
)
def test_a_changelog_about_something_else_is_refused(
    sections: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(Wrong, match=reason):
        check_changelog(changelog(tmp_path, *sections), "1.2.3")


def test_each_address_that_is_missing_is_named(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[project]\n[project.urls]\nHomepage = "https://example.org"\n')
    assert missing_links(tmp_path) == [
        "pyproject.toml: add to [project.urls]: Documentation, Repository, Issues, Changelog"
    ]

    links = ("Homepage", "Documentation", "Repository", "Issues", "Changelog")
    lines = "".join(f'{link} = "https://example.org"\n' for link in links)
    project.write_text(f"[project]\n[project.urls]\n{lines}")
    assert missing_links(tmp_path) == []


def test_a_changed_tree_and_a_tag_that_exists_stop_a_release(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        name = ("-c", "user.name=tests", "-c", "user.email=tests@example.org")
        command = ["git", *name, "-c", "commit.gpgsign=false", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=50)

    git("init")
    (tmp_path / "file").write_text("one\n")
    git("add", "file")
    git("commit", "-m", "One")
    assert missing_in_git(tmp_path, "1.2.3") == []

    git("tag", "v1.2.3")
    (tmp_path / "file").write_text("two\n")
    assert missing_in_git(tmp_path, "1.2.3") == [
        "git: commit your changes",
        "git: v1.2.3 exists already, raise __version__",
    ]


# --- the project's files ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"one", "has no newline at its end"),
        (b"one\r\n", "has a carriage return"),
        (b"one \ntwo\n", "line 1 ends in space"),
        (b"one\n\ttwo\n", "line 2 begins with a tab"),
        (b"\xe4\n", "is not UTF-8"),
    ],
)
def test_a_text_that_differs_from_editorconfig_is_named(content: bytes, fault: str) -> None:
    assert fault in faults_of(content, TEXT)
    assert faults_of(content, {}) == []


def test_a_text_that_keeps_to_editorconfig_and_a_picture_have_no_faults() -> None:
    assert faults_of(b"one\n    two\n", TEXT) == []
    assert faults_of(b"", TEXT) == []
    assert faults_of(b"\x89PNG\r\n\0\t", TEXT) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[*]\ncharset = utf-8\n", "root = true"),
        ("root = true\n[*]\ncharest = utf-8\n", "says charest"),
        ("root = true\n[*]\nindent_style = spaces\n", "says indent_style = spaces"),
    ],
)
def test_a_misspelt_editorconfig_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    """An editor would pass over it in silence."""
    (tmp_path / ".editorconfig").write_text(text)

    with pytest.raises(Wrong, match=reason):
        check_editorconfig(tmp_path)


def test_a_checker_that_cannot_run_is_a_failure(tmp_path: Path) -> None:
    """The tools of a release are not in the environment of the tests."""
    shutil.copytree(ROOT / ".github", tmp_path / ".github")

    with pytest.raises(Wrong, match="check-jsonschema is not there"):
        check_files(tmp_path)


# --- all of it --------------------------------------------------------------------------------


def release(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``scripts/release``. Its tools are installed at the first time."""
    return subprocess.run(
        [str(ROOT / "scripts" / "release"), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=840,
    )


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_release_could_be_made_today(tmp_path: Path) -> None:
    done = release("--check", str(tmp_path / "dist"))

    assert done.returncode == 0, done.stdout + done.stderr
    names = {path.name for path in (tmp_path / "dist").iterdir()}
    bill = f"mcp_sessions-{__version__}.cdx.json"
    packages = {
        f"mcp_sessions-{__version__}.tar.gz",
        f"mcp_sessions-{__version__}-py3-none-any.whl",
        f"mcp_sessions_conformance-{__version__}-py3-none-any.whl",
    }
    assert names == {*packages, bill, "SHA256SUMS"}
    sums = (tmp_path / "dist" / "SHA256SUMS").read_text().splitlines()
    assert set(sums) == {
        f"{hashlib.sha256((tmp_path / 'dist' / name).read_bytes()).hexdigest()}  {name}"
        for name in names - {"SHA256SUMS"}
    }
    listed = json.loads((tmp_path / "dist" / bill).read_text())["components"]
    assert {"mcp", "starlette"} <= {component["name"] for component in listed}
    assert not {"pip", "pytest", "twine"} & {component["name"] for component in listed}
