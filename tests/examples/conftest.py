"""The examples and the demo are executed here, as a reader would run them."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# As `python examples/notes_server.py` and `python scripts/demo.py` do it.
for folder in ("examples", "scripts"):
    sys.path.insert(0, str(ROOT / folder))
