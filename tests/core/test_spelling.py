"""How servers may read a name or a URI: what another spelling is, and what it is not."""

import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import product
from urllib.parse import quote, unquote, unquote_plus

import pytest
from can_ada import parse
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic_core import Url

from mcp_sessions.core.spelling import (
    MAX_CHARACTERS,
    check_plain,
    folded,
    hides_name,
    hides_uri,
    reveals_name,
    reveals_uri,
    subsumes_uri,
)
from mcp_sessions.errors import InvalidParams

SECRETS = (
    "file:///etc/secret",
    "https://intra.example/admin",
    "notes://all/secret",
    "notes:secret",
    "db://main/rows?table=secret",
)

Server = Callable[[str], str]


def normalize_url(uri: str) -> str:
    return parse(uri).href


SERVERS: dict[str, Server] = {
    "as it is": str,
    "whatwg": normalize_url,
    "pydantic": lambda uri: str(Url(uri)),
    "decoded": unquote,
    "decoded twice": lambda uri: unquote(unquote(uri)),
    "whatwg, then decoded": lambda uri: unquote(normalize_url(uri)),
    "decoded, then whatwg": lambda uri: normalize_url(unquote(uri)),
    "stripped": lambda uri: uri.strip(),
    "lower": lambda uri: uri.lower(),
    "no user": lambda uri: unquote(re.sub(r"(://)[^/?#\\]*@", r"\1", uri)),
    "no port": lambda uri: re.sub(r"^([a-z]+://[^/?#]*?):\d*(?=[/?#]|$)", r"\1", uri),
    "form": lambda uri: unquote_plus(uri) if "?" in uri else uri,
    "NFKC": lambda uri: unicodedata.normalize("NFKC", uri),
}
"""How servers come from the URI that they are sent to the one that they have."""


def read_as(server: Server, uri: str) -> str | None:
    """The URI that a server reads; None: it refuses it."""
    try:
        return server(uri)
    except ValueError:
        return None


def is_refused(uri: str) -> bool:
    """Whether no server sees it while something is hidden."""
    try:
        check_plain(uri)
    except InvalidParams:
        return True
    return False


def respelled(uri: str, seed: int) -> str:
    """Another spelling, of one or more tricks."""
    chance = random.Random(seed)

    def somewhere(text: str, put: str) -> str:
        at = chance.randrange(len(text) + 1)
        return text[:at] + put + text[at:]

    def encoded(text: str) -> str:
        at = chance.randrange(len(text))
        return text[:at] + "".join(f"%{byte:02x}" for byte in text[at].encode()) + text[at + 1 :]

    def after_a_slash(text: str, put: str) -> str:
        positions = [n + 1 for n, char in enumerate(text) if char in "/:"] or [0]
        at = chance.choice(positions)
        return text[:at] + put + text[at:]

    tricks: list[Callable[[str], str]] = [
        encoded,
        encoded,
        lambda text: text.replace("%", "%25"),
        lambda text: text.replace("/", "\\", chance.randrange(4)),
        lambda text: somewhere(text, chance.choice("\t\n\r ")),
        lambda text: chance.choice(" \t\x01") + text + chance.choice(" \n\x1f"),
        lambda text: "".join(char.upper() if chance.random() < 0.3 else char for char in text),
        lambda text: after_a_slash(text, chance.choice(["./", "x/../", "%2e/", "x/%2E%2e/", "/"])),
        lambda text: text.replace("///", chance.choice(["/", "", "//localhost/", "////"]), 1),
        lambda text: text.replace("example/", chance.choice(["example:443/", "example:/"])),
        lambda text: text.replace("://", chance.choice([":", ":/", ":///", "://u:p@"])),
        lambda text: text.replace("e", chance.choice(["ｅ", "E", "%65", "%2565"]), 1),
        lambda text: text.replace(".", chance.choice(["。", "．", "%2e"])),
        lambda text: text + chance.choice(["#", "#x", "?", "/"]),
        lambda text: re.sub(
            r"^(notes|db)(://\w+)", r"\1\2:" + chance.choice(["", "1", "80"]), text
        ),
        lambda text: text.replace("://", chance.choice(["://u%2f@", "://%5c@", "://%252f:p@"])),
    ]
    for _ in range(chance.randint(1, 4)):
        uri = chance.choice(tricks)(uri)
    return uri


@pytest.mark.parametrize("secret", SECRETS)
def test_no_server_takes_a_spelling_that_is_not_hidden_for_the_hidden_one(secret: str) -> None:
    """Whichever way the server comes from the URI that it is sent to its own one."""
    taken = dict.fromkeys(SERVERS, 0)
    own = {name: (secret, read_as(server, secret)) for name, server in SERVERS.items()}
    for seed in range(150 * settings().max_examples):
        uri = respelled(secret, seed)
        for name, server in SERVERS.items():
            if read_as(server, uri) in own[name]:
                taken[name] += uri != secret
                assert hides_uri(secret, uri) or is_refused(uri), (name, uri)
    # Each server is fooled by many: the tricks are those that work.
    fooled = {
        "as it is": False,
        "no user": "://" in secret,
        "no port": secret.startswith(("notes://", "db://")),
        "form": "?" in secret,
    }
    assert all(count > 20 for name, count in taken.items() if fooled.get(name, True)), taken


@given(st.sampled_from(SECRETS), st.lists(st.integers(0, 2**31), max_size=3), st.text())
@example(SECRETS[0], [], "/x/..%2f..%2fetc%5csecret")
def test_the_same_with_any_text_behind_a_spelling(
    secret: str, seeds: list[int], behind: str
) -> None:
    uri = secret
    for seed in seeds:
        uri = respelled(uri, seed)
    uri += behind
    for server in SERVERS.values():
        if read_as(server, uri) in (secret, read_as(server, secret)):
            assert hides_uri(secret, uri) or is_refused(uri)


BEGINNINGS = ("file:", "file://", "file:///", "http://", "HTTPS:/", "notes://", "x:", " ws://")
PIECES = (
    *"/\\.:@?#aB \t\n-_~^|`{}[]<>'\"%+*&=;!$(),", "..", "%2e", "%2F", "%5c", "é", "ẞ", "ı",
    "İ", "ς", "%73", "%2573", "％", "．", "／", "。", "K", "ﬀ", "xn--", "0x7f", "443", "80", "C:",
    "c|", "D:", "localhost", "\u200d", "\u00ad", "\x01", "\x7f", "\ufeff", "\u0301", "😀", "://",
)  # fmt: skip


@settings(max_examples=10 * settings().max_examples)
@given(st.sampled_from(BEGINNINGS), st.lists(st.sampled_from(PIECES), max_size=8))
@example("file:", ["C:", "\t", "("])
@example("file://", ["_", "(", "/", "D:"])
def test_what_a_parser_makes_of_any_uri_hides_that_uri(begins: str, pieces: list[str]) -> None:
    """Also where the two parsers differ, as they do for drives and for hosts of files."""
    uri = begins + "".join(pieces)
    for parser in ("whatwg", "pydantic"):
        made = read_as(SERVERS[parser], uri)
        if made is not None:
            assert hides_uri(made, uri) or is_refused(uri)


@pytest.mark.parametrize(
    ("secret", "uri"),
    [
        ("file:///etc/secret", "file:/etc/secret"),
        ("file:///etc/secret", "FILE:etc/secret"),
        ("file:///etc/secret", "file:///etc\\secret"),
        ("file:///etc/secret", "file:\\\\\\etc\\secret"),
        ("file:///etc/secret", "file://localhost/etc/secret"),
        ("file:///etc/secret", "file://anywhere/etc/secret"),
        ("file:///etc/secret", "file:////etc//secret"),
        ("file:///etc/secret", "file:///x/..%2fetc%5csecret"),
        ("file:///etc/secret", "file:///../etc/./secret"),
        ("file:///etc/secret", "file:///etc/se\tcr\net"),
        ("file:///etc/secret", "file:///etc/%2573ecret"),
        ("file:///etc/secret", "file:///ETC/secret. "),
        ("file:///etc/secret", "file:///etc/secret?x=1#y"),
        ("file:///etc/*", "file:/etc\\secret"),
        ("file:///*", "file:secret"),
        ("files://{+path}", "FILES://x/..%2f..%2fetc/secret"),
        ("files://etc/secret", "files://x/../etc/secret"),
        ("files://x/etc/secret", "files://x/../etc/secret"),
        ("https://intra.example/admin", "HTTPS://intra.example:443/admin"),
        ("https://intra.example/admin", "https:intra.example/admin"),
        ("https://intra.example/admin", "https://user:pass@intra.example/admin"),
        ("https://intra.example/admin", "https://intra.example./admin"),
        ("https://intra.example/admin", "https://intra。example/admin"),
        ("https://intra.example/admin", "https://ＩＮＴＲＡ.example/admin/"),
        ("https://intra.example:443/admin", "https://intra.example/admin"),
        ("https://bücher.example/a", "https://xn--bcher-kva.example/a"),
        ("https://intra.example*", "HTTPS://intra.example:443/x"),
        ("https://intra.example/*", "https://intra.example"),
        ("https://*.example/*", "HTTPS://a.b.EXAMPLE/c"),
        ("http://127.0.0.1/*", "http://0x7f.1/key"),
        ("*secret*", "notes://all/%53ECRET"),
        ("db://t?a=1", "db://t?b=2&a=1"),
        ("db://t?a=*&b=2", "db://t?b=2&c=3&%61=1"),
        ("doc://a?", "doc://a"),
        ("search://items?q=top secret", "search://items?q=top+secret"),
        ("search://items?q=top+secret", "search://items?x=1&q=top%20secret"),
        ("https://intra.example/admin", "https://x%2f@intra.example/admin"),
        ("https://intra.example/admin", "https://x%5c:y%252f@intra.example/admin"),
        ("https://intra.example/admin", "https:\\\\x%252f%40intra.example/admin"),
        ("note://secret", "note://x%2Fy@secret"),
        ("note://secret", "note://x%5c@secret:1"),
        ("note://secret", "note://secret:1"),
        ("note://secret", "note://secret%3A1"),
        ("note://secret/*", "note://secret:/a"),
        ("note://secret:1", "note://u@secret:1"),
        ("notes://all/what%3F", "notes://all/wh%61t%3F?x=1"),
        ("x://h/a.*", "X://h/%61.b"),
    ],
)
def test_these_are_one(secret: str, uri: str) -> None:
    """Each of them was served by some server, or may be. No server gets the unusual ones."""
    assert hides_uri(secret.replace("{+path}", "*"), uri) or is_refused(uri)


@pytest.mark.parametrize(
    ("secret", "uri"),
    [
        ("http://h/x", "http://h:80/x"),
        ("https://h/x", "https://h:443/x"),
        ("ws://h/x", "ws://h:80/x"),
        ("wss://h/x", "wss://h:443/x"),
        ("ftp://h/x", "ftp://h:21/x"),
        ("doc://a?x=1&y=2#p*", "doc://a?y=2&x=1#p1"),
        ("doc://a*b", "doc://a?%62"),
    ],
)
def test_these_are_one_and_no_server_refuses_them(secret: str, uri: str) -> None:
    assert hides_uri(secret, uri)


def test_a_pattern_in_other_letters_does_not_cover_all_of_another() -> None:
    """It covers the same readings, but not the URI as it is written."""
    assert subsumes_uri("x://h/*", "x://h/a")
    assert not subsumes_uri("X://h/*", "x://h/a")
    assert not subsumes_uri("x://h/a*", "x://h/b")


@pytest.mark.parametrize(
    ("pattern", "uri"),
    [
        ("notes://all/a", "notes://all/ab"),
        ("notes://all/a", "notes://all/b/a"),
        ("notes://all/a/*", "notes://all/a"),
        ("notes://all/*", "notes://other/x"),
        ("doc://a#part", "doc://a"),
        ("doc://a#part", "doc://a#other"),
        ("db://t?a=1", "db://t"),
        ("db://t?a=1", "db://t?a=2"),
        ("file:///etc/*", "file:///home/etc"),
        ("https://intra.example/*", "https://other.example/"),
        ("https://a@h/x", "https://h/x"),
        ("https://h/x", "https://h:8443/x"),
        ("note://h:1", "note://h:2"),
        ("note://h/x", "note://other/h:1/x"),
        ("search://a+b", "search://ab"),
        ("lang://c++", "lang://c"),
        ("x://h/100%25", "x://h/100"),
        ("delete_*", "https://h/delete_x"),
    ],
)
def test_these_are_two(pattern: str, uri: str) -> None:
    """To hide more than a server can mix up would take away what everybody may have."""
    assert not hides_uri(pattern, uri)


@pytest.mark.parametrize("uri", [*SECRETS, "https://h", "users://{id}/key", "x:y#z", "a://b?c"])
def test_a_uri_is_revealed_as_it_is(uri: str) -> None:
    assert reveals_uri(uri, uri) and hides_uri(uri, uri) and reveals_uri("*", uri)
    assert subsumes_uri("*", uri) and subsumes_uri(uri, uri) and not subsumes_uri(uri, "*")


@pytest.mark.parametrize(
    ("shown", "uri"),
    [
        ("notes://all/x/*", "notes://all/x/../secret"),
        ("notes://all/x/*", "notes://all/x/%2e%2e%2fsecret"),
        ("notes://*public*", "notes://all/secret?public"),
        ("notes://*public*", "notes://all/secret#public"),
        ("https://*public*", "https://public@h/secret"),
        ("notes://a", "notes://A"),
        ("notes://pub*", "notes://pub%2f@secret"),
        ("notes://*1", "notes://secret:1"),
        ("notes://a%2Ab", "notes://axxxb"),
    ],
)
def test_what_a_server_may_take_for_another_is_not_revealed(shown: str, uri: str) -> None:
    assert not reveals_uri(shown, uri)


@pytest.mark.parametrize(
    ("shown", "uri"),
    [
        ("db://t?id=*", "db://t?id=5"),
        ("notes://all/a%20b", "notes://all/a b"),
        ("https://a@h/*", "https://a@h/x"),
        ("notes://a:*", "notes://a:1"),
        ("notes://a:1/x", "notes://a:1/x"),
        ("https://h:8443/*", "https://h:8443/x"),
    ],
)
def test_what_is_named_is_revealed(shown: str, uri: str) -> None:
    assert reveals_uri(shown, uri)


@pytest.mark.parametrize(
    "uri",
    [
        "secret",
        "",
        "/etc/secret",
        "//intra.example/admin",
        "http://a b/",
        "http://h:99999/",
        "http://intra.example%3A443/",
        "notes://all/x%00y",
        "notes://all/x%2500y",
        "notes://all/\0x",
        "notes://all/\ud800",
        "x:100%",
        "file://elsewhere/etc/secret",
        "https://xn--bcher-kva.example/",
        "notes:///a",
        "notes://a/../b",
        "notes://a/b%5Cc",
        "notes://a/b%3Fc",
        "notes://a/b ",
        "notes://all/" + quote(quote(quote(quote(quote("%"))))),
        "x:" + "y" * MAX_CHARACTERS,
    ],
)
def test_what_servers_read_differently_is_refused(uri: str) -> None:
    with pytest.raises(InvalidParams, match="a resource URI"):
        check_plain(uri)


@pytest.mark.parametrize(
    "uri", [*SECRETS, "http://{host}:{port}/", "{scheme}://x", "notes://all/a b", "a:é"]
)
def test_what_is_a_url_or_a_template_of_some_is_not(uri: str) -> None:
    check_plain(uri)


def test_the_longest_text_takes_no_more_readings_than_any() -> None:
    """A client may send any: longer ones are hidden before anybody reads them."""
    for uri in ("x:" + "\ufdfa" * MAX_CHARACTERS, "x:" + "%25" * MAX_CHARACTERS):
        assert hides_uri("y:*", uri) and hides_name("z", uri)


# --- names ---------------------------------------------------------------------------------------

FOLDS: list[Callable[[str], str]] = [
    str.lower,
    str.upper,
    str.casefold,
    str.title,
    str.strip,
    lambda name: " ".join(name.split()),
    lambda name: "".join(char for char in name if unicodedata.category(char) not in ("Cc", "Cf")),
    *(
        lambda name, form=form: unicodedata.normalize(form, name)
        for form in ("NFC", "NFD", "NFKC", "NFKD")
    ),
]


def two_folds() -> Iterator[Callable[[str], str]]:
    for first, second in product(FOLDS, repeat=2):
        yield lambda name, first=first, second=second: second(first(name))


@given(st.text(st.one_of(st.characters(), st.sampled_from("ıİſẞßςΣﬀﬃ\u0345\u0307\u00adＡ\ufeffK"))))
def test_a_name_is_folded_as_any_server_folds_it_and_more(name: str) -> None:
    """So what a server takes for the same has the same fold."""
    for fold in two_folds():
        assert folded(fold(name)) == folded(name), (name, fold(name))


@pytest.mark.parametrize("name", ["PAY", " pay\n", "ｐａｙ", "p\u00aday", "pay\0", "P\u200bay "])
def test_a_name_is_hidden_however_it_is_written_and_revealed_as_it_is(name: str) -> None:
    assert hides_name("pay", name) and hides_name("p*", name) and not reveals_name("pay", name)
    assert not hides_name("pay", name + "s") and reveals_name(name, name)
