"""The file of API keys, which holds a hash of each key.

Rules, owned by ``tests/authentication/test_key_file.py``:

1. A key has 256 random bits, so a plain SHA-256 of it tells nobody the key.
2. Only its owner may read the file (mode 0600). If another user owns it, such as root, its group
   may read it as well (mode 0440 or 0640): this process reads it as a member of the group.
   Otherwise the file is refused. A command may change a file of its own that its group may read:
   the service may be in the group. The mode stays.
3. A change replaces the whole file at once. A reader sees the file before it or after it.
4. A read has a bound, and each member of the file is checked.

`ApiKeys` verifies keys by this file, and reads it again when it changes. Rules, owned by
``tests/authentication/test_api_keys.py``:

1. The file is looked at once a second, at most. A revoked key is refused a second later.
2. If the file cannot be read, the keys that were read before count for :data:`KEPT` seconds: an
   editor may be writing it. Then no key is accepted, because a key may have been revoked. Clients
   are answered that the server cannot verify keys for now, not that their key is bad.
3. A key is compared in constant time. The log has no key.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from mcp_sessions.authentication.credential import CannotVerify, Credential
from mcp_sessions.core.messages import entries_of, members_of
from mcp_sessions.errors import ConfigurationError
from mcp_sessions.unopened import reason_of

try:
    import fcntl
except ImportError:  # pragma: no cover
    fcntl = None

PREFIX: Final = "mcp_sessions_key_"
"""How each key begins, so that a scanner finds a key that was published."""

_KEY: Final = re.compile(PREFIX + r"([0-9a-f]{8})_[0-9a-f]{64}")
_ID: Final = re.compile(r"[0-9a-f]{8}")
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_NAME: Final = re.compile(r"[!-~](?:[ -~]{0,98}[!-~])?")
_SCOPE: Final = re.compile(r"[!#-\[\]-~]{1,100}")
"""RFC 6749, 3.3."""

LARGEST: Final = 1_048_576
"""Bytes of the file, at most. It has room for some 4,000 keys."""

_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class ApiKey:
    id: str
    """A part of the key that is no secret."""

    name: str
    """Its owner, who owns the sessions. Several keys may have one name."""

    sha256: str
    scopes: tuple[str, ...]
    created_at: int
    """In seconds since 1970."""

    expires_at: int | None
    """In seconds since 1970; None: never."""


FileStamp = tuple[int, ...]
"""Changes whenever the file does."""


def minted(name: str, scopes: Sequence[str], now: float, lasts: float | None) -> tuple[str, ApiKey]:
    """Make a new key, and return it with what the file holds of it.

    Args:
        lasts: Seconds until it expires; None: it does not expire.

    Raises:
        ConfigurationError: The name or a scope has characters that it cannot have.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            "the name of a key must have 1 to 100 printable ASCII characters: choose another"
        )
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            raise ConfigurationError(
                f"the scope {scope!r} has a space or another character that scopes cannot have: "
                "give each scope by its own --scope"
            )
    key_id = secrets.token_hex(4)
    key = f"{PREFIX}{key_id}_{secrets.token_hex(32)}"
    expires_at = None if lasts is None else int(now + lasts)
    return key, ApiKey(key_id, name, hash_of(key), tuple(scopes), int(now), expires_at)


def hash_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def id_of(text: str) -> str | None:
    found = _KEY.fullmatch(text)
    return found[1] if found is not None else None


def stamp_of(path: str) -> FileStamp:
    """Return the stamp of the file.

    Raises:
        ConfigurationError: There is no such file.
    """
    with _named(path):
        return _stamp(os.stat(path))


def read(path: str, *, by_command: bool = False) -> tuple[dict[str, ApiKey], FileStamp]:
    """Return the keys by their ids, and the stamp of what was read.

    Args:
        by_command: The group may read the file, also if this user owns it.

    Raises:
        ConfigurationError: The file is missing, is no file, is readable by others, is too large, or
            is not a file of keys.
    """
    with _named(path):
        # A named pipe would block.
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
        try:
            status = os.fstat(file)
            check_status(path, status, by_command=by_command)
            text = _whole(file)
        finally:
            os.close(file)
    if len(text) > LARGEST:
        raise ConfigurationError(
            f"{path}: the file has more than {LARGEST} bytes, and no file of keys has: name another"
        )
    return _parsed(path, text), _stamp(status)


def change(path: str, edit: Callable[[list[ApiKey]], list[ApiKey]]) -> None:
    """Replace the keys of the file by others. A missing file is made.

    Raises:
        ConfigurationError: The file cannot be read or written, or another command changes it now.
    """
    target = os.path.realpath(path)
    with _named(path), _alone(target, path):
        owner = os.stat(target) if os.path.lexists(target) else None
        keys = list(read(path, by_command=True)[0].values()) if owner is not None else []
        members = [asdict(key) for key in edit(keys)]
        text = json.dumps({"version": _VERSION, "keys": members}, indent=1).encode() + b"\n"
        if len(text) > LARGEST:
            raise ConfigurationError(f"{path}: the file is full: revoke keys that nobody uses")
        # Made with mode 0600.
        file, temporary = tempfile.mkstemp(prefix=".keys-", dir=os.path.dirname(target))
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(text)
                opened.flush()
                if owner is not None:
                    # The service keeps its file if root runs the command.
                    os.fchown(opened.fileno(), owner.st_uid, owner.st_gid)
                    os.fchmod(opened.fileno(), stat.S_IMODE(owner.st_mode))
                os.fsync(opened.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


@contextlib.contextmanager
def _alone(target: str, path: str) -> Generator[None]:
    if fcntl is None:
        yield
        return
    # The file itself is replaced, so the lock is on its folder.
    folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(
                f"{path}: another command is changing the file: run this one again"
            ) from None
        yield
    finally:
        os.close(folder)


@contextlib.contextmanager
def _named(path: str) -> Generator[None]:
    try:
        yield
    except OSError as failed:
        raise ConfigurationError(f"{path}: {reason_of(failed, path)}") from failed


def _stamp(status: os.stat_result) -> FileStamp:
    # The time of change also moves when the mode does.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def check_status(path: str, status: os.stat_result, *, by_command: bool = False) -> None:
    """Refuse a file with secrets that others may read or change.

    Raises:
        ConfigurationError: It is no file, or others may read or change it.
    """
    if not stat.S_ISREG(status.st_mode):
        raise ConfigurationError(f"{path}: this is a folder or a pipe: name a file")
    mode = stat.S_IMODE(status.st_mode)
    if os.name != "posix":
        return
    is_own = status.st_uid == os.geteuid() and not by_command
    if mode & (0o077 if is_own else 0o037):
        good = "600" if is_own else "440"
        raise ConfigurationError(
            f"{path}: other users may read or change the file (mode {mode:04o}): "
            f"run chmod {good} {path}"
        )


def _whole(file: int) -> bytes:
    parts: list[bytes] = []
    left = LARGEST + 1
    while left > 0 and (part := os.read(file, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _parsed(path: str, text: bytes) -> dict[str, ApiKey]:
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        # The error leaves out the text.
        raise ConfigurationError(
            f"{path}: the file is not complete, or no JSON: restore it from a copy"
        ) from None
    members = members_of(value)
    entries: Any = members.get("keys")
    if members.get("version") != _VERSION or not isinstance(entries, list):
        raise ConfigurationError(
            f"{path}: this is no file of API keys: name another, or make one with "
            "`mcp-sessions keys add`"
        )
    keys: dict[str, ApiKey] = {}
    for number, entry in enumerate(cast("list[Any]", entries), 1):
        key = _key(entry)
        if key is None or key.id in keys:
            raise ConfigurationError(
                f"{path}: entry {number} is no API key: remove the entry, and add the key again "
                "with `mcp-sessions keys add`"
            )
        keys[key.id] = key
    return keys


def _key(entry: Any) -> ApiKey | None:
    match entry:
        case {
            "id": str(key_id),
            "name": str(name),
            "sha256": str(hashed),
            "scopes": list(),
            "created_at": int(created_at),
            "expires_at": (int() | None) as expires_at,
        }:
            pass
        case _:
            return None
    given = entries_of(entry["scopes"])
    is_good = (
        _ID.fullmatch(key_id)
        and _NAME.fullmatch(name)
        and _HASH.fullmatch(hashed)
        and all(isinstance(scope, str) and _SCOPE.fullmatch(scope) for scope in given)
    )
    if not is_good:
        return None
    return ApiKey(key_id, name, hashed, tuple(given), created_at, expires_at)


logger = logging.getLogger(__name__)

ISSUER: Final = "urn:mcp-sessions:api-keys"
"""The issuer in the principal of a key's owner."""

KEPT: Final = 60.0
"""Seconds for which keys count that were read from a file that cannot be read any more."""

_LOOK_EVERY: Final = 1.0
_NO_HASH: Final = "0" * 64


class ApiKeys:
    """A verifier over a file of keys.

    Args:
        path: The file; see :mod:`mcp_sessions.authentication.key_file`.
        clock: Seconds since 1970.

    Raises:
        ConfigurationError: The file cannot be read.
    """

    def __init__(self, path: str, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._keys, self._stamp = read(path)
        self._credentials = dict[str, Credential]()
        """By the ids of their keys: what is made of one serves all its requests."""

        self._looked_at = clock()
        self._failed_at: float | None = None

    async def verify(self, token: str) -> Credential | None:
        """Return the owner of the key.

        Raises:
            CannotVerify: The file of keys could not be read for too long.
        """
        key_id = id_of(token)
        if key_id is None:
            return None
        now = self._clock()
        self._look(now)
        key = self._keys.get(key_id)
        expected = key.sha256 if key is not None else _NO_HASH
        is_right = hmac.compare_digest(hash_of(token), expected)
        if key is None or not is_right:
            return None
        if key.expires_at is not None and key.expires_at <= now:
            return None
        known = self._credentials.get(key_id)
        if known is None:
            known = Credential(key.name, ISSUER, None, key.scopes, key.expires_at)
            self._credentials[key_id] = known
        return known

    def _look(self, now: float) -> None:
        """Read the file again if it changed.

        Raises:
            CannotVerify: It could not be read for too long.
        """
        # If the clock was set back, the file is looked at all the same.
        if not 0 <= now - self._looked_at < _LOOK_EVERY:
            self._looked_at = now
            try:
                self._read_again()
            except ConfigurationError as failed:
                self._failed(failed, now)
        if self._failed_at is not None and not 0 <= now - self._failed_at < KEPT:
            if self._keys:
                logger.error("no API key is accepted until the file of keys can be read")
            self._keys = {}
            raise CannotVerify(_LOOK_EVERY)

    def _read_again(self) -> None:
        if self._failed_at is None and stamp_of(self._path) == self._stamp:
            return
        self._keys, self._stamp = read(self._path)
        self._credentials.clear()
        self._failed_at = None
        logger.info("the file of API keys was read: it has %d", len(self._keys))

    def _failed(self, failed: ConfigurationError, now: float) -> None:
        if self._failed_at is None:
            self._failed_at = now
            logger.error(
                "the file of API keys cannot be read; the keys read before stay valid for %d s: %s",
                KEPT,
                failed,
            )
