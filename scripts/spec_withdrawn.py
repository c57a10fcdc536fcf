"""Cites, for each withdrawn clause of ``spec/``, the clause that says it now.

``spec/withdrawn.json`` has both ids. ``python -m scripts.spec_withdrawn`` rewrites the citations
in every file of the repository. A range of ids, with *to*, stays: look at it by hand.
"""

import argparse
import json
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
WITHDRAWN = ROOT / "spec" / "withdrawn.json"
KINDS = ("*.py", "*.lua", "*.md", "*.ts", "*.json")


def withdrawn() -> dict[str, str]:
    """Withdrawn id → the id of the clause that says it now."""
    return json.loads(WITHDRAWN.read_text(encoding="utf-8"))


def mapped(text: str, now: dict[str, str]) -> str:
    """The text with no withdrawn id; what it then cites twice in a row it cites once."""
    ids = re.compile(
        rf"\b({'|'.join(now)})\b(?! to [A-Z]{{3}}\d)(?<! to [A-Z]{{3}}\d)(?<! to [A-Z]{{3}}\d\d)"
    )
    changed = ids.sub(lambda found: now[found[1]], text)
    if changed == text:
        return text
    row = re.compile(r"(\"?)\b[A-Z]{3}\d+\b\1(?:, \1[A-Z]{3}\d+\1(?!\w))+")
    return row.sub(lambda found: ", ".join(dict.fromkeys(found[0].split(", "))), changed)


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m scripts.spec_withdrawn", description=__doc__
    ).parse_args()
    listed = subprocess.run(
        ["git", "ls-files", *KINDS], cwd=ROOT, capture_output=True, text=True, check=True
    )
    now = withdrawn()
    for path in (ROOT / name for name in listed.stdout.split()):
        text = path.read_text(encoding="utf-8")
        if path != WITHDRAWN and (changed := mapped(text, now)) != text:
            path.write_text(changed, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
