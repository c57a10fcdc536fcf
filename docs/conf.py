"""How the documentation is built: ``scripts/docs``, or ``sphinx-build -W -c docs . OUT``.

The source is the repository, so that a link to a file beside ``docs/`` holds here too.
"""

# Sphinx is installed where the site is built, and not where types are checked.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false

import re
from pathlib import Path

from pygments.lexers.special import TextLexer
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.highlighting import lexers

from mcp_sessions import __version__

project = "mcp-sessions"
author = "The mcp-sessions authors"
copyright = "The mcp-sessions authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_inline_tabs"]
root_doc = "docs/index"
# What was installed beside an example is no page of ours.
exclude_patterns = ["**/node_modules"]
include_patterns = [
    "docs/**",
    "spec/*.md",
    "conformance/README.md",
    "examples/**/*.md",
    "C*.md",
    "SECURITY.md",
]
html_theme = "furo"
html_title = "mcp-sessions"
# Ours, over Sphinx's: it takes questions in whole sentences.
html_static_path = ["_static"]
html_js_files = ["search.js", "copy.js"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence"]

# The specification's diagrams are drawn by code hosts; here their source is shown.
lexers["mermaid"] = TextLexer()
# Lines of a log or of a wire are long: site.css breaks them.
lexers["log"] = TextLexer()
# A clause stands under its group, wherever that is.
suppress_warnings = ["myst.header"]

# Headings can be linked to by the names that code hosts give them.
myst_heading_anchors = 4

autodoc_member_order = "bysource"
# The arguments of a class are those of its `__init__`. A long signature has a line for each.
autoclass_content = "both"
autodoc_type_aliases = {"ASGIApp": "ASGIApp"}
maximum_signature_line_length = 80
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
# The types of signatures are of other packages, or documented where they are defined.
nitpicky = False


def _whole(docstring: GoogleDocstring) -> tuple[str, list[str]]:
    """Napoleon takes the words before a colon for the type of an attribute. Ours are words."""
    return "", docstring._dedent(docstring._consume_to_end())


GoogleDocstring._consume_inline_attribute = _whole


_PICTURE = re.compile(r'<img ([^>]*?)src="([^"]*/_images/[^"/]*)\.svg"([^>]*)/>')
_DARK = "@media (prefers-color-scheme: dark)"


def _two_pictures(app, pagename, templatename, context, doctree) -> None:
    """Show a picture for the page's own setting of light or dark, which may not be the system's."""
    two = "".join(rf'<img class="only-{each}" \1src="\2-{each}.svg"\3/>' for each in _SHOWN)
    if "body" in context:
        context["body"] = _PICTURE.sub(two, context["body"])


_SHOWN = {"light": "@media not all", "dark": "@media all"}


def _draw_both(images: Path) -> None:
    for picture in list(images.glob("*.svg")):
        drawn = picture.read_text("utf-8")
        for each, always in _SHOWN.items():
            picture.with_name(f"{picture.stem}-{each}.svg").write_text(
                drawn.replace(_DARK, always), "utf-8"
            )


def _opening(source: str) -> str:
    """Return the first sentence of a page, without its links."""
    paragraphs = (part.strip() for part in source.split("\n\n"))
    first = next((part for part in paragraphs if part[:1].isalpha() or part[:2] == "**"), "")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)|\*\*", r"\1", " ".join(first.split()))
    return re.split(r"(?<=[.?]) ", words)[0]


def _llms(app) -> str:
    """All pages in the order of the menu, for programs that read them: llmstxt.org."""
    index = (Path(app.srcdir) / "docs/index.md").read_text("utf-8")
    lines = ["# mcp-sessions", "", f"> {_opening(index)}"]
    for caption, entries in re.findall(r":caption: (.+?)\n.*?\n\n(.*?)```", index, re.DOTALL):
        lines += ["", f"## {caption}", ""]
        for name in re.findall(r"<(.+)>", entries):
            page = f"docs/{name}".replace("docs/../", "")
            title = app.env.titles[page].astext()
            source = (Path(app.srcdir) / f"{page}.md").read_text("utf-8")
            lines.append(f"- [{title}](_sources/{page}.md.txt): {_opening(source)}")
    return "\n".join(lines) + "\n"


def _add_files(app, error) -> None:
    if error is None and app.builder.name == "html":
        site = Path(app.outdir)
        _draw_both(site / "_images")
        (site / "llms.txt").write_text(_llms(app), "utf-8")
        (site / "index.html").write_text(
            '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">'
            '<title>mcp-sessions</title><a href="docs/index.html">mcp-sessions</a>\n'
        )


def setup(app) -> None:
    app.connect("html-page-context", _two_pictures)
    app.connect("build-finished", _add_files)
