"""How the documentation is built: ``scripts/docs``, or ``sphinx-build -W -c docs . OUT``.

The source is the repository, so that a link to a file beside ``docs/`` holds here too.
"""

# Sphinx is installed where the site is built, and not where types are checked.
# pyright: reportMissingImports=false, reportMissingTypeStubs=false, reportUnknownVariableType=false

from pygments.lexers.special import TextLexer
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.highlighting import lexers

from mcp_sessions import __version__

project = "mcp-sessions"
author = "The mcp-sessions authors"
copyright = "The mcp-sessions authors"
release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
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
# A clause stands under its group, wherever that is.
suppress_warnings = ["myst.header"]

# Headings can be linked to by the names that code hosts give them.
myst_heading_anchors = 3

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
