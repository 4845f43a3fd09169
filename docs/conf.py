"""Sphinx's settings. With the package and the group `docs` installed: sphinx-build -W docs docs/_build"""

import msda

project = "msda"
author = "The msda developers"
copyright = "2026, The msda developers"
version = release = msda.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "py:obj"  # of `names` in docstrings

myst_enable_extensions = ["amsmath", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the docstrings say more
napoleon_google_docstring = False
napoleon_use_rtype = False

html_theme = "alabaster"
html_theme_options = {
    "description": "Multi-scale deformable attention on the CPU, with the same bits every time",
    "fixed_sidebar": True,
    "page_width": "1100px",
}
html_static_path: list[str] = []
