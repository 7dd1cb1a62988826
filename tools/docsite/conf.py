"""How Sphinx builds the site; `docsite.assemble` wrote the pages that it finds."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

PAGES = Path(os.environ["POTLUCK_DOCS"])
project = "Potluck"
author = "the Potluck authors"
extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 4
myst_links_external_new_tab = True
highlight_language = "none"
# Output of commands and shortened YAML are no valid programs; all else is worth a failure.
suppress_warnings = ["misc.highlighting_failure"]
nitpicky = True
smartquotes = False  # options begin with two hyphens

html_theme = "furo"
html_title = "Potluck"
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_static_path = [str(PAGES / "_static")]
html_css_files = ["site.css"]
html_theme_options = {"top_of_page_buttons": []}

TERMS: dict[str, str] = json.loads((PAGES / "terms.json").read_text("utf-8"))


def explain(app: Any, tree: Any, page: str) -> None:
    """A word that leads to the glossary says its meaning where it stands."""
    from docutils import nodes

    for node in tree.findall(nodes.reference):
        name = str(node.get("refuri", "")).rpartition("#term-")[2]
        meaning = TERMS.get(name.replace("-", " ").lower())
        if meaning:
            node["reftitle"] = meaning


def setup(app: Any) -> None:
    app.connect("doctree-resolved", explain)
