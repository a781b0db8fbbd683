"""Sphinx: ``make docs``."""

import subprocess
import sys
from importlib.metadata import version as version_of
from pathlib import Path

project = "lockstep"
author = "The lockstep authors"
release = version = version_of("torch-lockstep")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "lockstep"
exclude_patterns = ["_build", "_pictures"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
suppress_warnings = ["misc.highlighting_failure"]

# Drawn anew from a run of this very code.
_HERE = Path(__file__).parent
subprocess.run([sys.executable, _HERE / "pictures.py", _HERE / "_pictures"], check=True)
