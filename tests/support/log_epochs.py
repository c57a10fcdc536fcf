"""Makes log epochs for tests."""

from mcp_sessions.ids import LogEpoch


def log_epoch(milliseconds: int, random_part: int) -> LogEpoch:
    """The epoch of a log that was made at ``milliseconds`` since 1970.

    Args:
        random_part: 0 to 999,999.
    """
    return LogEpoch(f"{milliseconds:013d}{random_part:06d}")
