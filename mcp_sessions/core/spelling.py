"""Which spellings of a name or a URI are one, for the rules that hide and reveal.

A server may normalise what it is asked for, each in its own way: by the WHATWG rules for URLs, by
percent-decoding, by the rules of a file system. Rules that must hold, and that the tests in
``tests/core/test_spelling.py`` own:

1. While a resource may be hidden, the server gets a URI only in its plain spelling.
   :func:`check_plain` refuses each other one, so no server reads more into a URI than is compared.
2. Texts are compared without case, Unicode form, spaces and percent-encoding. A rule that hides
   covers a text also without the parts that a server may ignore: a query, a fragment, user
   information, the port of a scheme of its own. If the pattern has such a part, it counts.
3. A rule that reveals covers a text as it is, and with each of these parts left out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import unquote

from mcp_sessions.errors import InvalidParams

MAX_CHARACTERS: Final = 2_048
"""The longest name or URI that is compared, also in its Unicode form NFKC. Longer ones are hidden
and refused.
"""

_REMEMBERED: Final = 1_024
"""Texts whose forms are kept."""

_WEB_PORTS: Final = {"http:": "80", "https:": "443", "ws:": "80", "wss:": "443", "ftp:": "21"}
"""Schemes that have another server at each port, and the port that may be left out."""

_PLAIN_URI: Final = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*:)(?P<slashes>/*)"
    r"(?P<authority>(?:[^\s%/?#@:\[\]<>|^]+(?::[^\s%/?#@:\[\]<>|^]+)?@)?"
    r"(?P<host>[^\s%/?#@:\[\]<>|^]*|\[[0-9a-f:.]+\])(?::(?P<port>[1-9][0-9]{0,4}))?)"
    r"(?:[/?#].*)?",
    re.DOTALL,
)
_WEB_HOST: Final = re.compile(
    r"(?!.*xn--)(?:[a-z0-9_-]+\.)*[a-z_][a-z0-9_-]*"  # a name whose last label is no number
    r"|(?:(?:0|[1-9][0-9]{0,2})(?:\.(?!$)|$)){4}|\[[0-9a-f:.]+\]"
)
_PORT: Final = re.compile(r":\{\w*\}(?=[/?#]|\Z)")
_EXPRESSION: Final = re.compile(r"\{[+#./;?&]?[\w.,:*]*\}", re.ASCII)
_AUTHORITY: Final = re.compile(r"([^:/?#]+:)/*(?:([^/?#@]*)@)?([^/?#@]*?)(:[0-9*]*)?(?=[/?#]|\Z)")
_UNSEEN_ASCII: Final = dict.fromkeys([*range(0x21), 0x7F])


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
        unseen = [char for char in set(text) if char.isspace() or _is_control(char)]
        text = text.translate(dict.fromkeys(map(ord, unseen)))
        if text == before:
            return text


def _is_control(char: str) -> bool:
    return unicodedata.category(char) in ("Cc", "Cf", "Cs")


def _is_too_long(text: str) -> bool:
    if len(text) > MAX_CHARACTERS:
        return True
    # One character may become eighteen.
    plain = unquote(text)
    return not plain.isascii() and len(unicodedata.normalize("NFKC", plain)) > MAX_CHARACTERS


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


@lru_cache(_REMEMBERED)
def _folded_parts(pattern: str) -> tuple[str, ...]:
    return tuple(folded(part) for part in pattern.split("*"))


def is_one_of(name: str, names_folded: Collection[str]) -> bool:
    """Whether a server may read a name as one of these, whose folded forms are given."""
    return _is_too_long(name) or folded(name) in names_folded


# --- URIs ----------------------------------------------------------------------------------------


def check_plain(uri: str) -> None:
    """Whether a URI, or a URI template, is in the one spelling that all servers read alike.

    Raises:
        InvalidParams: It has no scheme, is longer than ``MAX_CHARACTERS``, has a backslash, a
            control character, a dot segment or a space at an end, is percent-encoded twice, or
            hides a delimiter by its encoding. Or its host, its port or a slash behind its scheme
            has another usual form.
    """
    if _is_too_long(uri):
        raise InvalidParams(f"a resource URI of more than {MAX_CHARACTERS} characters")
    if not _is_plain(_EXPRESSION.sub("x", _PORT.sub(":1", uri))):
        raise InvalidParams("a resource URI in another spelling than the usual one")


@lru_cache(_REMEMBERED)
def _is_plain(uri: str) -> bool:
    found = _PLAIN_URI.fullmatch(uri.lower())
    try:
        decoded = unquote(uri, errors="strict")
    except UnicodeDecodeError:
        return False
    form = folded(decoded)
    if (
        found is None
        or uri != uri.strip()
        or any(map(_is_control, uri + decoded))
        or any(char in form for char in "\\%")
        or _delimiters(form, "?#") != _delimiters(uri, "?#")
        or _delimiters(folded(found["authority"]), "/@:") != _delimiters(found["authority"], "/@:")
        or _has_dots(form)
    ):
        return False
    slashes = found["slashes"]
    match found["scheme"]:
        case "file:":
            # Servers differ in what a drive of Windows is, unless a slash follows.
            return slashes == "///" and not re.match(r"file:///[a-z][:|](?!/|\Z)", form)
        case scheme if scheme in _WEB_PORTS:
            is_host = _WEB_HOST.fullmatch(found["host"]) is not None
            return slashes == "//" and is_host and int(found["port"] or 1) < 65_536
        case _:
            return slashes in ("", "//")


def _delimiters(text: str, which: str) -> list[str]:
    """The delimiters of a text: none may appear by decoding or by folding."""
    return [char for char in text if char in which]


def _has_dots(form: str) -> bool:
    """Whether a segment of the path is a dot segment, or ends in a dot, which some servers drop."""
    path = re.split(r"[?#]", form.partition(":")[2], maxsplit=1)[0]
    return any(segment.endswith(".") for segment in path.split("/"))


class _Form(NamedTuple):
    """A URI or a pattern as it is compared. A pattern has stars."""

    bases: tuple[str, ...]
    """The whole first; then without user information, without its port, and without both."""

    pairs: tuple[str, ...]
    fragment: str


@lru_cache(_REMEMBERED)
def _form(uri: str) -> _Form:
    rest, _, fragment = uri.partition("#")
    base, _, query = rest.partition("?")
    # A plus is a space there, for a server that reads the query as a form.
    pairs = _decoded(query).replace("+", "").split("&") if query else ()
    return _Form(tuple(dict.fromkeys(_bases(base))), tuple(pairs), _decoded(fragment))


def _bases(base: str) -> Iterator[str]:
    found = _AUTHORITY.match(base)
    if found is None:
        yield _path(base)
        return
    scheme, user, host, port = (part or "" for part in found.groups())
    scheme, rest = scheme.lower(), base[found.end() :]
    if scheme in _WEB_PORTS:
        host, port = host + ("" if port in ("", ":", ":" + _WEB_PORTS[scheme]) else port), ""
    user = user and user + "@"
    for who, where in ((user, port), ("", port), (user, ""), ("", "")):
        whole = _path(scheme + who + host + where + rest)
        is_bare = scheme in _WEB_PORTS and "/" not in whole and not whole.endswith("*")
        yield whole + "/" if is_bare else whole


def _decoded(text: str) -> str:
    """Decode a text once, and fold it. A star that was encoded is no star of a pattern."""
    return "*".join(folded(unquote(part)).replace("*", "%2a") for part in text.split("*"))


def _path(text: str) -> str:
    """One slash where a file system reads one, and none at the end."""
    text = re.sub(r"^([^:/]+:)/+", r"\1", _decoded(text))
    return re.sub(r"/{2,}", "/", text).rstrip("/")


def hides_uri(pattern: str, uri: str) -> bool:
    """Whether a rule that hides covers a URI, or what a server may read in it."""
    if _is_too_long(uri) or fits(pattern.split("*"), uri):
        return True
    covering, read = _form(pattern), _form(uri)
    parts = covering.bases[0].split("*")
    return (
        any(fits(parts, base) for base in read.bases)
        and all(any(fits(p.split("*"), each) for each in read.pairs) for p in covering.pairs)
        and (not covering.fragment or fits(covering.fragment.split("*"), read.fragment))
    ) or fits(_whole(covering).split("*"), _whole(read))


def reveals_uri(pattern: str, uri: str) -> bool:
    """Whether a rule that reveals covers a URI, and all that a server may read in it."""
    exact = [unquote(part) for part in pattern.split("*")]
    if not _is_plain(_EXPRESSION.sub("x", uri)) or not fits(exact, unquote(uri)):
        return False
    covering, read = _form(pattern), _form(uri)
    has_more = bool(covering.pairs or covering.fragment)
    # What the pattern names of an authority, the server does not leave out.
    bases = read.bases if len(covering.bases) == 1 else read.bases[:1]
    parts = covering.bases[0].split("*")
    return fits(_whole(covering).split("*"), _whole(read)) and (
        has_more or all(fits(parts, base) for base in bases)
    )


def subsumes_uri(pattern: str, other: str) -> bool:
    """Whether a pattern covers, in each reading, all that another one covers."""
    more, less = _form(pattern), _form(other)
    return (
        fits(pattern.split("*"), other)
        and fits(_whole(more).split("*"), _whole(less))
        and fits(more.bases[0].split("*"), less.bases[0])
    )


def _whole(form: _Form) -> str:
    query = "?" + "&".join(form.pairs) if form.pairs else ""
    return form.bases[0] + query + ("#" + form.fragment if form.fragment else "")
