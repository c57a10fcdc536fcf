"""The sealing key of a store in a file: beside it, where nobody gave a key.

Rules, owned by ``tests/serve/test_sealing_key_file.py``:

1. The file has what ``MCP_SESSIONS_KEYS`` has: keys, newest first, separated by commas.
2. It is whole, or it is not there. No other user can read it at any time.
3. It is made by the process that serves from the store, while the store is its own.
4. Sessions of conversations are found by their key alone. A store that has some gets no new key.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import tempfile
from pathlib import Path

from mcp_sessions.authentication.key_file import check_status
from mcp_sessions.core.states import Mode
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.sealing import SealedValues
from mcp_sessions.security import SessionSecurity, mint_key
from mcp_sessions.stores.contract import SessionStore
from mcp_sessions.stores.encrypted import encrypted
from mcp_sessions.unopened import reason_of

logger = logging.getLogger(__name__)

_LARGEST = 65_536
"""Bytes that are read of it."""


def key_path_of(store: SessionStore, security: SessionSecurity) -> Path | None:
    """Return where the key of ``store`` is; None: its keys are given, or the store is no file."""
    return getattr(store, "key_path", None) if security.is_default else None


def checked_key_file(store: SessionStore, security: SessionSecurity) -> SessionSecurity:
    """Look at the file, if it is there, and return the keys of a start. Change nothing.

    Raises:
        ConfigurationError: It cannot be read or used, or others may read it.
    """
    path = key_path_of(store, security)
    found = copy.copy(security)
    if path is not None and (text := _read(path)) is not None:
        found.use_keys(text, str(path))
    return found


def encrypted_store(store: SessionStore, security: SessionSecurity) -> SessionStore:
    """Return the store, encrypted with these keys.

    Raises:
        ConfigurationError: The store does not last, or the keys do not.
    """
    if security.is_ephemeral and key_path_of(store, security) is None:
        raise ConfigurationError(
            "an encrypted store needs keys that outlive this process: set MCP_SESSIONS_KEYS to "
            "what `mcp-sessions keygen` prints"
        )

    async def keys_of(opened: SessionStore) -> SealedValues:
        await take_keys(opened, security)
        return security.stored_values

    return encrypted(store, keys_of)


async def take_keys(store: SessionStore, security: SessionSecurity) -> None:
    """Have the keys of the file used, and make it if it is not there.

    Args:
        store: It is open.
        security: Nobody else has it.

    Raises:
        ConfigurationError: The file cannot be read, used or made, or others may read it; or it is
            not there, and sessions are found by its key.
        StoreUnavailable: The store is away.
    """
    path = key_path_of(store, security)
    if path is None:
        return
    text = _read(path)
    if text is None:
        records = await store.all_sessions()
        if any(record.mode is Mode.CONVERSATION for record in records):
            raise ConfigurationError(
                f"{path}: the sealing key is not there, and the store has sessions of "
                "conversations that only this key finds: restore the file, or set MCP_SESSIONS_KEYS"
            )
        text = mint_key()
        _make(path, text)
        if records:
            logger.warning(
                "%s was not there, though the store has sessions: it is a new sealing key now, and "
                "clients get invalid_state once for what an earlier key sealed",
                path,
            )
        else:
            logger.info("%s is the sealing key of this store: keep it with the store", path)
    security.use_keys(text, str(path))


def _read(path: Path) -> str | None:
    try:
        # A named pipe would block.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as failed:
        raise ConfigurationError(f"{path}: {reason_of(failed, path)}") from failed
    try:
        check_status(str(path), os.fstat(file))
        return os.read(file, _LARGEST).decode()
    except (OSError, UnicodeDecodeError) as failed:
        raise ConfigurationError(f"{path}: the sealing key cannot be read") from failed
    finally:
        os.close(file)


def _make(path: Path, text: str) -> None:
    try:
        # Made with mode 0600.
        file, temporary = tempfile.mkstemp(prefix=f"{path.name}-", dir=path.parent)
        try:
            with os.fdopen(file, "w") as opened:
                opened.write(f"{text}\n")
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(temporary, path)
            _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
    except OSError as failed:
        raise ConfigurationError(f"{path}: {reason_of(failed, path)}") from failed


def _sync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
