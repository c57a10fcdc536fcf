"""What the code cites: clauses that exist, and no document that its reader cannot open."""

import re
import subprocess
from pathlib import Path

from scripts.spec_generated import clauses

ROOT = Path(__file__).parents[2]
CLAUSES = {clause.id for clause in clauses()}
GROUPS = sorted({re.sub(r"\d+$", "", clause) for clause in CLAUSES})
CITED = re.compile(rf"\b(?:{'|'.join(GROUPS)})\d+\b")
OTHER_SOURCE = re.compile(
    r"[Pp]itfalls? [A-Z]\d|[Dd]ocument 00\d|"
    r"\b(?:protocol|architecture|pitfalls|style|structure)\.md"
)


def sources() -> list[Path]:
    """Every Python and Lua file of the repository, but for this one."""
    listed = subprocess.run(
        ["git", "ls-files", "*.py", "*.lua"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split() if ROOT / name != Path(__file__)]


def test_every_clause_that_code_cites_exists() -> None:
    cited = {
        (clause, str(path.relative_to(ROOT)))
        for path in sources()
        for clause in CITED.findall(path.read_text("utf-8"))
    }
    assert len({clause for clause, _ in cited}) > 100
    assert {(clause, where) for clause, where in cited if clause not in CLAUSES} == set()


def test_code_cites_no_document_that_is_not_in_the_repository() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if OTHER_SOURCE.search(line)
    ]
    assert found == []
