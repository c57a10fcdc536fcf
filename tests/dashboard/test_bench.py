"""The bench of calls beside an open page runs. Its figure at full size is for a quiet machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.rows import ROWS, Row
from tests.house.source import ROOT


def test_the_bench_measures_calls_with_the_page_open_and_closed(tmp_path: Path) -> None:
    file = tmp_path / "rows"
    size = "--sessions 100 --events 100 --rounds 1 --seconds 1 --stores memory".split()
    ended = subprocess.run(
        [sys.executable, "-m", "bench.bench_dashboard", *size],
        cwd=ROOT,
        env={**os.environ, ROWS: str(file)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    # 1: the aim was missed, as it may be here.
    assert ended.returncode in (0, 1), ended.stderr
    (row,) = [Row(**json.loads(line)) for line in file.read_text().splitlines()]
    assert row.measured and row.ratio
    assert "changes of the page" in row.includes and "; 0 changes" not in row.includes
