"""All benches, one after the other, each in a process of its own; and the pages of their figures.

    python -m bench [--quick] [--only NAME]… [--json FILE] [--page]

Prints every row as it is measured, and writes all of them to a file. ``--page`` writes
``docs/figures.json`` and, made from it, ``docs/figures.md`` and its parts. ``--quick`` measures
less, to see that everything runs; its figures are for no page. A bench that does not end in its
time is ended, and one that fails is named with the last thing it said; both make this end with
status 1. A figure that misses its aim does not: it is marked. On a busy machine read the ratios
only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench import figures
from bench.benches import BENCHES, Bench
from bench.rows import ROWS, Row

ROOT = Path(__file__).parents[1]


def run(bench: Bench, *, quick: bool) -> dict[str, Any]:
    arguments = bench.quick if quick else bench.arguments
    command = ["python", "-m", bench.module, *arguments]
    print(f"{bench.name}: {' '.join(command)}", flush=True)
    begun = time.monotonic()
    with tempfile.NamedTemporaryFile("r") as rows, tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=ROOT,
            env={**os.environ, ROWS: rows.name},
            stderr=said,
            # Its child processes end with it.
            start_new_session=True,
        )
        try:
            status = process.wait(bench.within)
            failed = ""
        except subprocess.TimeoutExpired:
            status, failed = None, f"not done after {bench.within:g} s"
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it left nothing behind
            process.wait()
        found = [Row(**json.loads(line)) for line in rows]
        if status is not None and not (status == 0 or any(row.has_missed for row in found)):
            said.seek(0)
            failed = (said.read().strip().splitlines() or [f"status {status}"])[-1]
    if failed:
        print(f"  FAILED: {failed}", flush=True)
    return {
        "name": bench.name,
        "command": " ".join(command),
        "seconds": round(time.monotonic() - begun),
        "failed": failed,
        "rows": [asdict(row) for row in found],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench")
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--quick", action="store_true", help="measure less")
    parser.add_argument("--only", action="append", choices=names, metavar="NAME")
    parser.add_argument("--json", type=Path, default=ROOT / ".cache" / "bench" / "figures.json")
    parser.add_argument("--page", action="store_true", help="write the page")
    asked = parser.parse_args()
    if asked.page and (asked.quick or asked.only):
        parser.error("the page is made from one whole run")
    wanted = [bench for bench in BENCHES if not asked.only or bench.name in asked.only]
    found = [run(bench, quick=asked.quick) for bench in wanted]
    results = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "quick": asked.quick,
        "benches": found,
    }
    text = json.dumps(results, indent=1, ensure_ascii=False) + "\n"
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(text)
    print(f"written: {asked.json}")
    if asked.page:
        figures.JSON.write_text(text)
        figures.write(results)
        print(f"written: {figures.JSON} and the pages of figures")
    sys.exit(1 if any(bench["failed"] for bench in found) else 0)


if __name__ == "__main__":
    main()
