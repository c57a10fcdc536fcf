"""The list of expected differences is exact: nothing is missing from it, nothing too many."""

from pathlib import Path

import pytest

from tests.interop.theirs.installs import HERE
from tests.interop.theirs.manifest import Manifest, Outcome, findings, read

PASSED, FAILED = Outcome("passed", ""), Outcome("failed", "AssertionError: 1 != 2")
MANIFEST = Manifest("1.0", {"leg": 2}, {"leg": {"test_b": "it is meant"}})


def test_what_is_as_expected_is_not_worth_a_word() -> None:
    assert findings(MANIFEST, "leg", {"test_a": PASSED, "test_b": FAILED}) == []


@pytest.mark.parametrize("outcome", ["failed", "skipped", "error"])
def test_what_does_not_pass_and_is_not_listed_is_found_with_what_it_said(outcome: str) -> None:
    seen = Outcome(outcome, "what it said")

    [found] = findings(MANIFEST, "leg", {"test_a": seen, "test_b": FAILED})

    assert "test_a" in found and "what it said" in found


def test_what_is_listed_and_passes_is_found() -> None:
    [found] = findings(MANIFEST, "leg", {"test_a": PASSED, "test_b": PASSED})

    assert "test_b" in found and "passes" in found


def test_a_test_that_is_gone_is_found() -> None:
    found = findings(MANIFEST, "leg", {"test_a": PASSED})

    assert any("no such test" in line for line in found)
    assert any("1 tests ran, not 2" in line for line in found)


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ('legs = ["other"]\nwhy = "x"\ntests = ["t"]', "does not run"),
        ('legs = ["leg"]\nwhy = " "\ntests = ["t"]', "no reason"),
        ('legs = ["leg"]\nwhy = "x"\ntests = ["t", "t"]', "twice"),
    ],
)
def test_a_list_that_says_nothing_is_refused(tmp_path: Path, entry: str, complaint: str) -> None:
    path = tmp_path / "list.toml"
    path.write_text(f'version = "1"\n[ran]\nleg = 1\n[[difference]]\n{entry}\n')

    with pytest.raises(ValueError, match=complaint):
        read(path)


@pytest.mark.parametrize("path", sorted((HERE / "expected").glob("*.toml")), ids=lambda p: p.stem)
def test_the_lists_can_be_read_and_give_a_reason_for_each_test(path: Path) -> None:
    manifest = read(path)

    assert any(manifest.differences.values())
