"""Prints the way of each kind of request through the packages, as `sys.setprofile` sees it.

    ./scripts/walk [--show] [NAME]…

*Functions* are our functions that one request enters, in that many *files*. A *stay* is a run of
consecutive calls in one file. A *return* goes back to a file that the walk had left. A *climb* is a
call of a file on a higher floor; the floors are the layers of the import contracts. *Calls* are
the calls of these functions, and those that they make of anything else. ``--show`` prints the
functions in their order.
"""

import argparse
import asyncio
import logging
import sys
import tomllib
from pathlib import Path
from typing import Any, cast

from tests.support.recorded import record
from tests.support.walks import WALKS

ROOT = Path(__file__).parents[1]
ROW = "{:22}{:>7}{:>11}{:>7}{:>7}{:>9}{:>8}"


class Floors(dict[str, tuple[int, ...]]):
    """File → its floor: the level of its layer in each import contract. The highest is the
    smallest.
    """

    def __init__(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
        contracts = cast("list[dict[str, Any]]", project["tool"]["importlinter"]["contracts"])
        self._lists: list[list[list[str]]] = [
            [
                [f"{within}{name.strip()}" for name in layer.split("|")]
                for layer in contract["layers"]
            ]
            for contract in contracts
            if contract["type"] == "layers"
            for within in [f"{name}." for name in contract.get("containers", ())] or [""]
        ]

    def __missing__(self, file: str) -> tuple[int, ...]:
        module = file.removeprefix("transports/").removesuffix(".py").replace("/", ".")
        floor = tuple(
            next((at for at, layer in enumerate(layers) if _is_in(module, layer)), len(layers))
            for layers in self._lists
        )
        self[file] = floor
        return floor


def _is_in(module: str, layer: list[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in layer)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="scripts/walk", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(WALKS))
    parser.add_argument("--show", action="store_true", help="print the functions, too")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in WALKS]
    if unknown:
        parser.error(f"no such walk: {unknown[0]}; there are {', '.join(WALKS)}")
    logging.disable()
    floors = Floors()
    print(ROW.format("walk", "calls", "functions", "files", "stays", "returns", "climbs"))
    for name in given.names or WALKS:
        found = asyncio.run(record(WALKS[name]))
        numbers = found.files, found.stays, found.returns, found.climbs(floors)
        print(ROW.format(name, found.calls, len(found.functions), *numbers), flush=True)
        if given.show:
            print(*(f"    {file}: {function}" for file, function in found.functions), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
