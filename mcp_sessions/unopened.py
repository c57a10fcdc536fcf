"""Say why a file cannot be opened. A folder that is missing is named."""

from __future__ import annotations

import os

from mcp_sessions.errors import ConfigurationError


def reason_of(failed: OSError, path: str | os.PathLike[str]) -> str:
    """Say why a file cannot be opened."""
    return _missing_folder(path) or (failed.strerror or str(failed)).lower()


def no_such_file(path: str | os.PathLike[str]) -> ConfigurationError:
    missing = _missing_folder(path)
    return ConfigurationError(f"no such file: {path}{missing and ': '}{missing}")


def _missing_folder(path: str | os.PathLike[str]) -> str:
    folder = os.path.dirname(os.path.abspath(path))
    return "" if os.path.isdir(folder) else f"there is no folder {folder}"
