"""Sphinx configuration; `make docs` builds with warnings as errors and without the network."""

import os
import shutil
import sys
from pathlib import Path

from mxref._version import SPECIFICATION, __version__
from mxref.explain.link import EXPLORER

sys.path.insert(0, str(Path(__file__).parent / "_ext"))
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # the studies, which render what they measured

project = "mxref"
author = "the mxref authors"
copyright = author
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "mxref_spec",
    "clause_contents",
    "measured",
    "api_pages",
    "command_line",
    "search_words",
    "shipped",
    "charts",
    "source_pages",
    "published",
]
# The address of the published pages, as in https://example.org/mxref/. Without it there are no canonical links, and no
# sitemap, whose links are absolute.
html_baseurl = os.environ.get("MXREF_DOCS_URL", "")
if html_baseurl:
    html_baseurl = html_baseurl.rstrip("/") + "/"  # the sitemap puts the names of pages right behind it
    extensions.append("sphinx_sitemap")
    sitemap_url_scheme = "{link}"
exclude_patterns = ["_build", "_measured", "spec/vectors"]
default_role = "code"
smartquotes = False
rst_epilog = f".. |specification| replace:: {SPECIFICATION}"

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
toc_object_entries = False  # a page of a hundred names lists its sections alone
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"mxref {version}"
html_static_path = ["_static"]
html_css_files = ["wrap.css", "spec.css"]
html_show_copyright = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#2b5fa8", "color-brand-content": "#2b5fa8"},
    "dark_css_variables": {"color-brand-primary": "#7fb2ff", "color-brand-content": "#7fb2ff"},
}
pygments_style = "a11y-light"
pygments_dark_style = "github-dark"


def magnitude_bars(app, what, name, obj, options, lines):
    """Escape the bars of |x|, which reStructuredText would read as a substitution."""
    for i, line in enumerate(lines):
        parts = line.split("`")
        parts[::2] = [part.replace("|", r"\|") for part in parts[::2]]
        lines[i] = "`".join(parts)


def copy_explorer(app, error):
    """Put the explorer page beside the built pages, as it is: it needs nothing of them."""
    if not error and app.builder.format == "html":
        shutil.copytree(EXPLORER, Path(app.outdir) / "explorer", dirs_exist_ok=True)


def setup(app):
    app.connect("autodoc-process-docstring", magnitude_bars)
    app.connect("build-finished", copy_explorer)
