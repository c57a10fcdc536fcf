"""Prints the name of each package that users install with this one, without a bound, a line each.

`.github/workflows/newest.yml` installs the newest release of each.
"""

import argparse
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

OURS = ("mcp-sessions",)
FOR_DEVELOPERS = ("dev", "docs", "demo")


def names(pyproject: Path) -> list[str]:
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(line for extra in extras if extra not in FOR_DEVELOPERS for line in extras[extra]),
    ]
    wanted = {Requirement(line).name for line in lines}
    return sorted(wanted.difference(OURS))


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m scripts.dependencies", description=__doc__).parse_args()
    print("\n".join(names(Path(__file__).parents[1] / "pyproject.toml")))
