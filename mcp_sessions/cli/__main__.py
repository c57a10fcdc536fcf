"""Run the command: ``mcp-sessions``, or ``python -m mcp_sessions.cli`` if it is not on PATH.

Ctrl+C may come during the first imports, too.
"""

import sys


def run() -> int:
    try:
        from mcp_sessions.cli.main import main

        return main()
    except KeyboardInterrupt:
        print("mcp-sessions: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(run())
