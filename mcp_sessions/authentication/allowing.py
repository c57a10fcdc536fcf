"""Decide which users of an identity provider may use the server: ``--allow``.

Rules, owned by ``tests/authentication/test_allowing.py``:

1. ``*`` is every user of the provider. A pattern with ``@`` is of a mail address, ``login:NAME`` of
   a login, and ``group:NAME`` of a group or role. One that fits is enough.
2. In a mail address, ``*`` is any text without ``@``. The case of ASCII letters does not count in
   addresses and logins. Other letters count as they are: some of them fold to ASCII.
3. A mail address counts only if the provider says that it belongs to the user.
4. The first claim of :data:`_LOGIN` that the provider sends is the login. Users may choose the
   others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mcp_sessions.core.messages import texts_of
from mcp_sessions.errors import ConfigurationError

_LOGIN: Final = ("login", "cognito:username", "username", "preferred_username")
_GROUPS: Final = ("groups", "roles", "cognito:groups")
_VERIFIED: Final = ("email_verified", "verified", "xms_edov")


class Allowed:
    """The users that may use the server.

    Args:
        patterns: See above.
        verifies_mail: Whether each address that the provider names belongs to its user, also where
            the provider does not say so.

    Raises:
        ConfigurationError: There is none, or one has another form.
    """

    def __init__(self, patterns: Sequence[str], *, verifies_mail: bool) -> None:
        if not patterns:
            raise ConfigurationError(
                "--auth without --allow would admit every user of the provider: give --allow "
                "'*@example.com', --allow login:NAME, --allow group:NAME, or --allow '*' for all"
            )
        self._all = "*" in patterns
        self._verifies_mail = verifies_mail
        self._logins = set[str]()
        self._groups = set[str]()
        self._mail = list[re.Pattern[str]]()
        for pattern in patterns:
            kind, colon, name = pattern.partition(":")
            if colon and name and kind == "login":
                self._logins.add(_folded(name))
            elif colon and name and kind == "group":
                self._groups.add(name)
            elif pattern.count("@") == 1 and not pattern.endswith("@"):
                parts = (re.escape(part) for part in _folded(pattern).split("*"))
                self._mail.append(re.compile("[^@]*".join(parts)))
            elif pattern != "*":
                raise ConfigurationError(
                    f"--allow {pattern}: must be '*@example.com', login:NAME, group:NAME or '*'"
                )

    def has(self, claims: Mapping[str, Any]) -> bool:
        if self._all:
            return True
        login = next((str(claims[each]) for each in _LOGIN if claims.get(each)), "")
        if _folded(login) in self._logins or _groups(claims) & self._groups:
            return True
        mail: Any = claims.get("email")
        if not isinstance(mail, str) or not self._is_verified(claims):
            return False
        return any(pattern.fullmatch(_folded(mail)) for pattern in self._mail)

    def _is_verified(self, claims: Mapping[str, Any]) -> bool:
        said = [claims[each] for each in _VERIFIED if claims.get(each) is not None]
        if not said:
            return self._verifies_mail
        return all(each in (True, 1, "true", "1") for each in said)


def _folded(text: str) -> str:
    return text.lower() if text.isascii() else text


def _groups(claims: Mapping[str, Any]) -> set[str]:
    return {group for name in _GROUPS for group in texts_of(claims.get(name))}
