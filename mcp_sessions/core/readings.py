"""How the wrapped server may read a name or a URI, and whether a pattern covers it then.

Servers normalise what they are asked for, each in its own way: by the WHATWG rules for URLs, by
percent-decoding, by the rules of a file system. So a text has several readings. Rules that must
hold, and that the tests in ``tests/core/test_readings.py`` own:

1. Two texts that one server may take for the same have a reading in common.
2. A rule that hides covers a text if one reading fits. A rule that reveals covers a text only if
   every reading fits. So no spelling shows more than the server's own one does.
3. A pattern is read in the same ways. Its ``*`` stands for any text in each of them.
4. A part that a server may ignore is left out of a reading, unless the pattern has such a part:
   a query, a fragment, user information, the host of a file, the port of a scheme of its own.
5. A URI without a WHATWG form has no sure reading: :func:`check_readable` refuses it.

The parser is ``ada-url``, a binding of Ada. Node.js parses URLs with Ada as well, so the reading
here is the reading of a server in JavaScript. Ada is tested against the web platform's own suite.
Pydantic, which reads the URIs of the Python SDK 1.x, uses another parser of the same standard;
the tests compare both.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

from mcp_sessions.errors import InvalidParams

ROUNDS = 4
"""How often a text is decoded. A server decodes once, or twice by mistake."""

REMEMBERED = 1_024
"""Texts whose readings are kept."""

_AUTHORITY = re.compile(r"([^:/?#]+:[/\\]{2,})([^/\\?#]*@)?([^/\\?#]*?)(:[0-9]*)?(?=[/\\?#]|\Z)")
"""Its beginning, user information, host and port, of a URI that is not decoded."""

_WITH_PORTS = ("http:", "https:", "ws:", "wss:", "ftp:")
"""Schemes that have another server at each port."""


class Less(NamedTuple):
    uri: str
    lacks_user: bool
    lacks_port: bool


@lru_cache(REMEMBERED)
def less_of(uri: str) -> tuple[Less, ...]:
    """Return a URI without its user information, without its port, and without both.

    Some servers ignore these parts. They are removed before each round of decoding, because a
    decoded slash in a user name does not end the host.
    """
    found: dict[Less, None] = {}
    text = uri
    for _ in range(ROUNDS + 1):
        for each in (text, whatwg(text) or text):
            match = _AUTHORITY.match(each)
            if match is None:
                continue
            begins, user, host, port = (part or "" for part in match.groups())
            if begins.lower().startswith(_WITH_PORTS):
                host, port = host + port, ""
            rest = each[match.end() :]
            if user:
                found[Less(begins + host + port + rest, True, False)] = None
            if port:
                found[Less(begins + user + host + rest, False, True)] = None
            if user and port:
                found[Less(begins + host + rest, True, True)] = None
        text = unquote(text)
    return tuple(found)


def whatwg(uri: str) -> str | None:
    # Loaded where something is hidden, and nowhere else.
    from ada_url import normalize_url

    try:
        return normalize_url(uri)
    except ValueError:  # of text that is not Unicode, too
        return None


MAX_CHARACTERS = 2_048
"""The longest name or URI that is compared, also in its Unicode form NFKC.

Longer ones are hidden and refused.
"""

Parts = tuple[str, ...]
"""The text between the stars of a pattern. A text without stars is one part."""

_Text = TypeVar("_Text", str, Parts)

_EXPRESSION = re.compile(r"\{[^{}]*\}")
"""An expression of a URI template."""

_UNSEEN_ASCII = dict.fromkeys([*range(0x21), 0x7F])
_USER = re.compile(r"^([^:/]*:)[^/]*@")
_DRIVE = re.compile(r"^/*([a-z])[:|]")
"""A drive of a file on Windows. Pydantic reads a slash behind it, Ada does not."""

_PUNYCODE = re.compile(r"xn--([^./:?#@]+)")
_DOTS = re.compile(r"\.+(?=:|$)")
_ENDINGS = re.compile(r"[?#]")


def fits(parts: Sequence[str], text: str) -> bool:
    """Whether a text consists of these parts in order, with any text between two of them."""
    first, *rest = parts
    if not rest:
        return text == first
    *middle, last = rest
    if not text.startswith(first):
        return False
    at = len(first)
    for part in middle:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return text.endswith(last) and len(text) - len(last) >= at


def folded(text: str) -> str:
    """A text without differences of case, Unicode form and width, and without spaces, control
    characters and characters that nobody sees.
    """
    if text.isascii():
        return text.lower().translate(_UNSEEN_ASCII)
    while True:
        before = text
        text = unicodedata.normalize("NFKC", text.upper().casefold())
        unseen = [char for char in set(text) if _is_unseen(char)]
        text = text.translate(dict.fromkeys(map(ord, unseen)))
        if text == before:
            return text


def _is_too_long(text: str) -> bool:
    if len(text) > MAX_CHARACTERS:
        return True
    # One character may become eighteen.
    plain = unquote(text)
    return not plain.isascii() and len(unicodedata.normalize("NFKC", plain)) > MAX_CHARACTERS


def _is_unseen(char: str) -> bool:
    return char.isspace() or unicodedata.category(char) in ("Cc", "Cf")


def check_readable(uri: str) -> None:
    """Whether a URI, or a URI template, has a form that all servers agree on.

    Raises:
        InvalidParams: It has none: it is no URL by the WHATWG rules, is longer than
            ``MAX_CHARACTERS``, holds a NUL, or is percent-encoded more than ``ROUNDS`` times.
    """
    if _is_too_long(uri):
        raise InvalidParams(f"a resource URI of more than {MAX_CHARACTERS} characters")
    plain = uri
    for _ in range(ROUNDS):
        plain = unquote(plain)
    if unquote(plain) != plain:
        raise InvalidParams("a resource URI that is percent-encoded again and again")
    if "\0" in plain:
        raise InvalidParams("a resource URI with a NUL")
    # A variable may be a host, which has letters, or a port, which has none.
    instead = {_EXPRESSION.sub("x", uri), _EXPRESSION.sub("1", uri)}
    if all(whatwg(each) is None for each in instead):
        raise InvalidParams("a resource URI that is no valid URL; servers may read it differently")


# --- names ---------------------------------------------------------------------------------------


def hides_name(pattern: str, name: str) -> bool:
    """Whether a rule that hides covers a name: as it is, or folded."""
    if _is_too_long(name):
        return True
    return fits(pattern.split("*"), name) or fits(_folded_parts(pattern), folded(name))


def reveals_name(pattern: str, name: str) -> bool:
    return fits(pattern.split("*"), name)


def subsumes_name(pattern: str, other: str) -> bool:
    """Whether a pattern covers, as it is and folded, all that another one covers."""
    return fits(pattern.split("*"), other) and fits(
        _folded_parts(pattern), "*".join(_folded_parts(other))
    )


@lru_cache(REMEMBERED)
def _folded_parts(pattern: str) -> Parts:
    return tuple(folded(part) for part in pattern.split("*"))


def is_one_of(name: str, names_folded: Collection[str]) -> bool:
    """Whether a server may read a name as one of these, whose folded forms are given."""
    return _is_too_long(name) or folded(name) in names_folded


# --- URIs ----------------------------------------------------------------------------------------


class _Reading(NamedTuple):
    whole: str
    base: str
    pairs: Parts
    fragment: str


@dataclass(frozen=True, slots=True)
class _Uri:
    normal: str | None
    readings: tuple[_Reading, ...]
    without_host: tuple[str, ...]


class _PatternReading(NamedTuple):
    whole: Parts
    base: Parts
    pairs: tuple[Parts, ...]
    fragment: Parts
    has_more: bool
    """Whether it has a query or a fragment, so that no server of its ignores them."""

    def fits_parts(self, bases: Sequence[str], reading: _Reading) -> bool:
        """Whether it fits one of these bases, with the query and fragment of a reading."""
        return (
            any(fits(self.base, base) for base in bases)
            and all(any(fits(pair, each) for each in reading.pairs) for pair in self.pairs)
            and (self.fragment == ("",) or fits(self.fragment, reading.fragment))
        )


@dataclass(frozen=True, slots=True)
class _UriPattern:
    listed: Parts
    normal: Parts
    readings: tuple[_PatternReading, ...]
    has_user: bool
    has_port: bool


def hides_uri(pattern: str, uri: str) -> bool:
    """Whether a rule that hides covers a URI: in any reading."""
    if _is_too_long(uri):
        return True
    kept = _read_pattern(pattern)
    return _hides(kept, uri) or any(_hides(kept, less.uri) for less in less_of(uri))


def _hides(kept: _UriPattern, uri: str) -> bool:
    read = _read_uri(uri)
    if fits(kept.listed, uri):
        return True
    if read.normal is not None and (
        fits(kept.normal, read.normal) or fits(kept.listed, read.normal)
    ):
        return True
    for covering, reading in dict.fromkeys(zip(kept.readings, read.readings, strict=True)):
        bases = [reading.base, reading.base.rstrip("/"), _USER.sub(r"\1", reading.base)]
        bases += read.without_host
        if fits(covering.whole, reading.whole) or covering.fits_parts(bases, reading):
            return True
    return False


def reveals_uri(pattern: str, uri: str) -> bool:
    """Whether a rule that reveals covers a URI: in every reading."""
    kept, normal = _read_pattern(pattern), _read_uri(uri).normal
    if not fits(kept.listed, uri) and (normal is None or not fits(kept.normal, normal)):
        return False
    return _reveals(kept, uri) and all(
        _reveals(kept, less.uri)
        for less in less_of(uri)
        if not (less.lacks_user and kept.has_user) and not (less.lacks_port and kept.has_port)
    )


def _reveals(kept: _UriPattern, uri: str) -> bool:
    read = _read_uri(uri)
    for covering, reading in dict.fromkeys(zip(kept.readings, read.readings, strict=True)):
        if not fits(covering.whole, reading.whole):
            return False
        if covering.has_more:
            continue
        has_user = any("@" in part for part in covering.base)
        base = reading.base if has_user else _USER.sub(r"\1", reading.base)
        if not fits(covering.base, base) and not fits(covering.base, base.rstrip("/")):
            return False
    return True


def subsumes_uri(pattern: str, other: str) -> bool:
    """Whether a pattern covers, in each reading, all that another one covers."""
    more, less = _read_pattern(pattern), _read_pattern(other)
    return (
        fits(more.listed, "*".join(less.listed))
        and fits(more.normal, "*".join(less.normal))
        and all(
            fits(kept.whole, "*".join(each.whole)) and fits(kept.base, "*".join(each.base))
            for kept, each in zip(more.readings, less.readings, strict=True)
        )
    )


@lru_cache(REMEMBERED)
def _read_uri(uri: str) -> _Uri:
    normal = whatwg(uri)
    texts = _texts(uri, normal)
    paths = [
        _ENDINGS.split(each, maxsplit=1)[0].removeprefix("file://").partition("/")[2]
        for each in dict.fromkeys(texts[1:])
        if each.startswith("file://") and not each.startswith("file:///")
    ]
    without_host = [_resolved("file:" + _plain(path), True).rstrip("/") for path in paths]
    return _Uri(normal, _readings(texts), tuple(without_host))


@lru_cache(REMEMBERED)
def _read_pattern(pattern: str) -> _UriPattern:
    # Replaces a star while a URI is read: letters and digits, which no parser changes.
    star = "z" + hashlib.sha256(pattern.encode("utf-8", "replace")).hexdigest()[:24]
    listed = pattern.replace("*", star)
    normal = whatwg(listed)
    if normal is not None and pattern.endswith("*"):
        # A parser ends a host that has no path with a slash.
        before, found, _ = normal.rpartition(star)
        normal = before + found if found else normal

    def parts(text: str) -> Parts:
        return tuple(text.split(star))

    def pattern_of(reading: _Reading) -> _PatternReading:
        base = reading.base if reading.base.endswith(star) else reading.base.rstrip("/")
        return _PatternReading(
            whole=parts(reading.whole),
            base=parts(base),
            pairs=tuple(parts(pair) for pair in reading.pairs),
            fragment=parts(reading.fragment),
            has_more=bool(reading.pairs or reading.fragment),
        )

    authority = pattern.partition("://")[2].partition("/")[0]
    return _UriPattern(
        has_user="@" in authority,
        has_port=":" in authority.rpartition("@")[2],
        listed=tuple(pattern.split("*")),
        normal=parts(normal if normal is not None else listed),
        readings=tuple(pattern_of(each) for each in _readings(_texts(listed, normal))),
    )


def _texts(uri: str, normal: str | None) -> tuple[str, str, str]:
    """Return a URI as it is, parsed, and decoded before it is parsed."""
    parsed = normal if normal is not None else uri
    decoded = uri
    for _ in range(ROUNDS):
        decoded = unquote(decoded)
    return uri, parsed, parsed if decoded == uri else whatwg(decoded) or parsed


def _readings(texts: Sequence[str]) -> tuple[_Reading, ...]:
    """The readings of a URI, in an order that is the same for all. Each text is decoded after it is
    split and before, and read with the final dots of its segments and without.
    """
    found: list[_Reading] = []
    for text in texts:
        rest, hash_sign, fragment = text.partition("#")
        base, mark, query = rest.partition("?")
        found += _read(_plain(base), mark, _plain(query), hash_sign, _plain(fragment))
        rest, hash_sign, fragment = _plain(text).partition("#")
        base, mark, query = rest.partition("?")
        found += _read(base, mark, query, hash_sign, fragment)
    return tuple(found)


def _read(base: str, mark: str, query: str, hash_sign: str, fragment: str) -> list[_Reading]:
    # A plus is a space there, for a server that reads the query as a form.
    query = query.replace("+", "")
    pairs = tuple(sorted(query.split("&"))) if query else ()
    return [
        _Reading(each + mark + query + hash_sign + fragment, each, pairs, fragment)
        for each in (_resolved(base, False), _resolved(base, True))
    ]


def _plain(text: str) -> str:
    """Decode as often as a server may, fold, and use one kind of slash."""
    for _ in range(ROUNDS):
        before = text
        text = folded(unquote(text)).replace("\\", "/")
        text = _PUNYCODE.sub(_spelled_out, text)
        if text == before:
            break
    return text


def _spelled_out(label: re.Match[str]) -> str:
    # Releases of a parser map a few letters of hosts differently. The letters are compared.
    try:
        return folded(label[1].encode("ascii").decode("punycode"))
    except UnicodeError:
        return label[0]


def _resolved(base: str, stripped: bool) -> str:
    """Remove dot segments and empty segments, as a file system does."""
    scheme, colon, rest = base.partition(":")
    if not colon:
        scheme, rest = "", base
    if scheme == "file":
        rest = _DRIVE.sub(r"\1:/", rest)
    kept: list[str] = []
    segments = rest.split("/")
    for segment in segments:
        if segment == "..":
            del kept[-1:]
        elif segment not in ("", "."):
            kept.append(_DOTS.sub("", segment) if stripped else segment)
    end = "/" if kept and segments[-1] in ("", ".", "..") else ""
    return scheme + colon + "/".join(kept) + end
