"""Sphinx: ``make docs``."""

from importlib.metadata import version as version_of

project = "lockstep"
author = "The lockstep authors"
release = version = version_of("torch-lockstep")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "lockstep"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
suppress_warnings = ["misc.highlighting_failure"]
