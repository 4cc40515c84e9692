"""Sphinx configuration: `sphinx-build -W -q -b html docs docs/_build/html`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import layers  # noqa: E402 - beside this file

import varprop  # noqa: E402 - the checkout that the pages are about

project = "varprop"
author = "The varprop developers"
copyright = "The varprop developers"
release = version = varprop.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
]
exclude_patterns = ["_build"]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"varprop {release}"
html_static_path = ["_static"]
html_css_files = ["page.css"]
math_eqref_format = "Eq. {number}"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autosummary_generate = False
default_role = "code"
python_maximum_signature_line_length = 88
toc_object_entries = False


def complete_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Add the tables of supported layers, and remove the empty line that doctest needs after an output."""
    source[0] = re.sub(r"\n\n```\n", "\n```\n", source[0])
    if docname == "networks":
        source[0] += "\n" + layers.page().replace("## ", "### ")


def link_equations(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Set indented formulas of a docstring verbatim, escape |x| and *, and link "Eq. n" to the maths page."""
    out: list[str] = []
    literal = False
    for before, line in zip(["", *lines], lines, strict=False):
        indented = line.startswith("    ")
        if indented and not before.strip() and not literal and not line.lstrip().startswith(">>>"):
            out += ["::", ""]
            literal = True
        elif line.strip() and not indented:
            literal = False
        if not literal and not line.lstrip().startswith((">>>", "...")):
            line = line.replace("|", r"\|").replace("*", r"\*")
            line = re.sub(r"Eq\. (\d+(?:(?:, | and | to )\d+)*)", _linked, line)
        out.append(line)
    lines[:] = out


def _linked(citation: re.Match[str]) -> str:
    return re.sub(r"\d+", r":eq:`eq-\g<0>`", citation.group(1))


def setup(app: Sphinx) -> None:
    app.connect("source-read", complete_source)
    app.connect("autodoc-process-docstring", link_equations)
