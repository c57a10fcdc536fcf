"""The built site: its search answers what users ask, and each page is read in a real browser.

``questions.json`` has questions that users asked of comparable projects. The site's own search
(its index, Sphinx's script and ours) is asked each of them. ``site.js`` measures the pages in
Chromium, on a wide and on a narrow screen, in light and in dark.
"""

import json
import queue
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from tests.support.browser import browsing, chromium_program
from tests.support.servers import serve

ROOT = Path(__file__).parents[2]
LISTS = frozenset({"genindex.html", "py-modindex.html", "search.html"})
"""Pages that Sphinx fills, with nothing to read."""
CODE = 100
"""Characters of a line of code that a page of 1280 pixels shows."""
BROKEN = ("log", "json", "mermaid")
"""Languages whose long lines ``site.css`` breaks."""
FORWARD = "/index.html"
"""Leads to the first page."""

LONG = "/spec/checklists.html is too long"
"""One checklist for each transport, in one file: an implementer prints it."""

WITHIN = 200.0
"""Seconds for a browser to measure all pages."""

QUESTIONS = json.loads((Path(__file__).with_name("questions.json")).read_text())["questions"]


def found(site: Path, questions: list[str]) -> list[list[str]]:
    """For each question the pages that the search of a built site finds, best first."""
    node = shutil.which("node")
    assert node is not None, "missing: node (install Node.js 20 or later)"
    done = subprocess.run(
        [node, str(Path(__file__).with_name("search.mjs")), str(site)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def missed(answers: list[list[str]]) -> list[str]:
    """Each question whose page is not among the first three, with what was found instead."""
    return [
        f"{asked['question']!r}: {asked['page']} is not in {pages[:3]}"
        for asked, pages in zip(QUESTIONS, answers, strict=True)
        if asked["page"] not in pages[:3]
    ]


@pytest.fixture(scope="module")
def site() -> Path:
    """The site as ``scripts/docs`` builds it."""
    built = subprocess.run(
        [ROOT / "scripts" / "docs"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert built.returncode == 0, built.stderr[-3_000:]
    return ROOT / ".cache" / "docs"


@pytest.mark.full
@pytest.mark.timeout(400)
def test_the_search_finds_the_page_that_answers_among_the_first_three(site: Path) -> None:
    asked = [each["question"] for each in QUESTIONS]

    assert missed(found(site, asked)) == []


def test_there_are_twenty_questions_and_each_has_its_page() -> None:
    assert len({each["question"] for each in QUESTIONS}) >= 20
    assert [each["page"] for each in QUESTIONS if not (ROOT / f"{each['page']}.md").is_file()] == []


def test_a_page_that_is_found_too_late_is_seen() -> None:
    right = [[each["page"]] for each in QUESTIONS]
    late = [["a", "b", "c", QUESTIONS[0]["page"]], *right[1:]]

    assert missed(right) == []
    assert len(missed(late)) == 1


def too_wide(page: str) -> list[str]:
    """The lines of code that scroll on a screen of 1280 pixels: ``site.css`` has the room."""
    found: list[str] = []
    language = None
    for line in page.splitlines():
        fence = re.match(r" *(?:```|~~~)(.*)", line)
        if fence is not None:
            language = fence[1] if language is None else None
        elif language is not None and language not in BROKEN and len(line) > CODE:
            found.append(line)
    return found


def test_a_line_of_code_has_at_most_100_characters() -> None:
    pages = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "spec").glob("*.md"),
        *(ROOT / "examples").rglob("README.md"),
        *ROOT.glob("C*.md"),
        ROOT / "conformance" / "README.md",
    ]
    own = [page for page in pages if "node_modules" not in page.parts]

    assert len(own) > 60
    assert {page.name: wide for page in own if (wide := too_wide(page.read_text("utf-8")))} == {}
    assert too_wide(f"```sh\n{'x' * 101}\n```\n{'x' * 101}\n```log\n{'x' * 101}\n```") == [
        "x" * 101
    ]


class Measuring:
    """Serves some pages to a browser that measures them, and takes its report."""

    def __init__(self, folder: Path, pages: list[str]) -> None:
        self._pages = pages
        self._reports: queue.Queue[dict[str, Any]] = queue.Queue()
        self.app = Starlette(
            routes=[
                Route("/measure", self._measure),
                Route("/measure.js", self._script),
                Route("/pages.json", self._list),
                Route("/report", self._take, methods=["POST"]),
                Mount("/", StaticFiles(directory=folder)),
            ]
        )

    async def _measure(self, request: Request) -> Response:
        return HTMLResponse(
            '<!doctype html><body><script type="module" src="/measure.js"></script>'
        )

    async def _script(self, request: Request) -> Response:
        script = Path(__file__).with_name("site.js").read_text("utf-8")
        return Response(script, media_type="text/javascript")

    async def _list(self, request: Request) -> Response:
        return JSONResponse(self._pages)

    async def _take(self, request: Request) -> Response:
        self._reports.put(json.loads(await request.body()))
        return Response()

    def report(self) -> dict[str, Any]:
        return self._reports.get(timeout=WITHIN)


def measured(
    folder: Path, pages: list[str], here: Path, *, width: int, background: str
) -> list[str]:
    """The faults that a browser finds in the pages of a folder."""
    measuring = Measuring(folder, pages)
    prefers = f"--blink-settings=preferredColorScheme={0 if background == 'dark' else 1}"
    with serve(measuring.app) as server:
        url = server.url(f"/measure?width={width}&background={background}")
        size = f"--window-size={width + 100},1000"
        with browsing(chromium_program(), here / "profile", url, options=(prefers, size)):
            report = measuring.report()
    if not report["faults"]:
        assert report["measured"] == len(pages)
    return report["faults"]


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("background", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_page_and_its_code_fit_the_screen_and_code_can_be_copied(
    site: Path, tmp_path: Path, width: int, background: str
) -> None:
    found = {
        f"/{page.relative_to(site).as_posix()}"
        for page in site.rglob("*.html")
        if page.name not in LISTS
    }
    pages = sorted(found - {FORWARD})

    assert len(pages) > 40
    faults = measured(site, pages, tmp_path, width=width, background=background)
    assert [fault for fault in faults if not fault.startswith(LONG)] == []


@pytest.mark.full
@pytest.mark.timeout(400)
def test_programs_find_every_page_of_the_menu_in_one_file(site: Path) -> None:
    text = (site / "llms.txt").read_text("utf-8")
    linked = re.findall(r"^- \[.+\]\((.+)\): \S", text, re.M)

    assert text.startswith("# mcp-sessions\n\n> Your MCP server keeps its sessions")
    assert len(linked) > 50 and all((site / link).is_file() for link in linked)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_dark_page_has_a_dark_picture_whatever_the_system_prefers(site: Path) -> None:
    page = (site / "docs" / "index.html").read_text("utf-8")
    shown = dict(re.findall(r'<img class="only-(light|dark)"[^>]* src="\.\./([^"]+)"', page))

    assert shown.keys() == {"light", "dark"}
    for background, picture in shown.items():
        drawn = (site / picture).read_text("utf-8")
        assert "prefers-color-scheme" not in drawn
        assert ("@media all" in drawn) is (background == "dark")


BAD = """<!doctype html><body style="background: #fff"><article style="overflow-wrap: anywhere">
<h1 style="width: 3em">Incomprehensibilities</h1><div style="width: 500px">A wide block.</div>
<p style="color: #ccc">It is pale.</p><div class="highlight"><pre>no button</pre></div></article>
"""
WIDE = """<!doctype html><body><article style="height: 22001px"><style>pre { overflow: auto }
button { position: absolute; left: 0 }</style><div class="highlight" style="position: relative">
<pre style="width: 99px">a line of code that is longer than its box</pre>
<button class="copy" style="top: 0">Copy</button></div></article><script>
document.querySelector("button").onclick = () => navigator.clipboard.writeText(
  document.querySelector("pre").innerText);</script>
"""


@pytest.mark.full
@pytest.mark.timeout(100)
def test_each_fault_of_a_page_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "bad.html").write_text(BAD)

    faults = measured(folder, ["/bad.html"], tmp_path, width=390, background="dark")

    assert [fault.split(":")[0] for fault in faults] == [
        "/bad.html scrolls sideways",
        "/bad.html breaks in a word",
        "/bad.html is not copied",
        "/bad.html is hard to see (1.6)",
        "/bad.html is not dark",
    ]


@pytest.mark.full
@pytest.mark.timeout(100)
def test_each_fault_of_a_wide_page_is_seen(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "bad.html").write_text(WIDE)

    faults = measured(folder, ["/bad.html"], tmp_path, width=1280, background="light")

    assert [fault.split(":")[0] for fault in faults] == [
        "/bad.html has a button on its code",
        "/bad.html has code that scrolls",
        "/bad.html is too long",
    ]
