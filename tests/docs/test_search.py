"""The site's search answers what users ask, in their words.

``questions.json`` has questions that users asked of comparable projects. The built site's own
search (its index, Sphinx's script and ours) is asked each of them.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUESTIONS = json.loads((Path(__file__).with_name("questions.json")).read_text())["questions"]


def found(site: Path, questions: list[str]) -> list[list[str]]:
    """For each question the pages that the search of a built site finds, best first."""
    node = shutil.which("node")
    assert node is not None, "missing: node (install Node.js 20 or later)"
    done = subprocess.run(
        [node, str(Path(__file__).with_name("search.mjs")), str(site)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def missed(answers: list[list[str]]) -> list[str]:
    """Each question whose page is not among the first three, with what was found instead."""
    return [
        f"{asked['question']!r}: {asked['page']} is not in {pages[:3]}"
        for asked, pages in zip(QUESTIONS, answers, strict=True)
        if asked["page"] not in pages[:3]
    ]


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_search_finds_the_page_that_answers_among_the_first_three() -> None:
    built = subprocess.run(
        [ROOT / "scripts" / "docs"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3_000:]

    asked = [each["question"] for each in QUESTIONS]

    assert missed(found(ROOT / ".cache" / "docs", asked)) == []


def test_there_are_twenty_questions_and_each_has_its_page() -> None:
    assert len({each["question"] for each in QUESTIONS}) >= 20
    assert [each["page"] for each in QUESTIONS if not (ROOT / f"{each['page']}.md").is_file()] == []


def test_a_page_that_is_found_too_late_is_seen() -> None:
    right = [[each["page"]] for each in QUESTIONS]
    late = [["a", "b", "c", QUESTIONS[0]["page"]], *right[1:]]

    assert missed(right) == []
    assert len(missed(late)) == 1
