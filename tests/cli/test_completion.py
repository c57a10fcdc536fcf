"""``mcp-sessions --print-completion``: a shell completes commands, options and files."""

import subprocess
import sys
from pathlib import Path

import pytest

from mcp_sessions.cli.main import COMMANDS, main
from tests.support.programs import system_program


def printed(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code in (0, None)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("", sorted(COMMANDS)),
        ("serve --max-chil", ["--max-children"]),
        ("keys revo", ["revoke"]),
        ("serve --log-format ", ["json", "text"]),
        ("serve --config mcp.j", ["mcp.json"]),
    ],
)
def test_bash_completes(
    typed: str, offered: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "completion").write_text(printed("bash", capsys))
    (tmp_path / "mcp.json").touch()
    words = ["mcp-sessions", *typed.split(" ")]
    quoted = " ".join(f"'{word}'" for word in words)
    script = f"""
source completion
COMP_WORDS=({quoted})
COMP_CWORD={len(words) - 1}
$(complete -p mcp-sessions | sed -E 's/.*-F ([^ ]+).*/\\1/') mcp-sessions '{words[-1]}'
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    bash = system_program("bash", "bash", "brew install bash")
    done = subprocess.run(
        [bash, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=50, check=True
    )
    assert sorted(set(done.stdout.split()) - {"-h", "--help"}) == offered, done.stderr


def test_zsh_gets_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed("zsh", capsys)
    assert text.startswith("#compdef mcp-sessions")
    assert all(f'"{name}:' in text or f"{name})" in text for name in COMMANDS)


def test_without_its_library_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", "bash"])
    assert ended.value.code == 2
    assert "pip install 'mcp-sessions[completion]'" in capsys.readouterr().err
