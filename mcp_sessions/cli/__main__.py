"""Run ``python -m mcp_sessions.cli``: the command, if its script is not on PATH."""

import sys

from mcp_sessions.cli.main import main

sys.exit(main())
