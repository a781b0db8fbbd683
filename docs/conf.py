"""Sphinx: ``make docs``."""

import json
import subprocess
import sys
from importlib.metadata import version as version_of
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.search.en import SearchEnglish

project = "lockstep"
author = "The lockstep authors"
release = version = version_of("torch-lockstep")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "lockstep"
exclude_patterns = ["_build", "_commands", "_pictures"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
suppress_warnings = ["misc.highlighting_failure"]

# Made anew by this very code.
_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE))
for _name in "commands", "history", "pictures", "reference":
    subprocess.run([sys.executable, _HERE / f"{_name}.py", _HERE / f"_{_name}"], check=True)

# A reference to a name of lockstep's that isn't documented is an error. Those of other projects
# can't be looked up without a network.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*"), ("py:.*", r"torch\..*")]

# What people look for, each of which the search is to find.
_SEARCHED = """
validation metrics AUC BLEU early stopping plateau best resume restart checkpoint seed dropout noise
accumulation nanoGPT GAN EMA padding collate_fn IterableDataset webdataset datasets speedup warmup
num_workers learning download tqdm wandb mlflow docker shm kubernetes slurm pdb profiler jupyter
notebook barrier Windows macOS FSDP2 find_unused_parameters
contrastive triplets negatives
"""


def _check_search(app: Sphinx, error: Exception | None) -> None:
    """Fail if the search would find nothing for one of the words."""
    if error is not None or app.builder.name != "html":
        return
    text = (Path(app.outdir) / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    english = SearchEnglish({})
    found = {**index["terms"], **index["titleterms"]}
    missing = [word for word in _SEARCHED.split() if english.stem(word.lower()) not in found]
    if missing:
        raise SphinxError(f"The search finds no page for: {', '.join(missing)}")


def _show_overview(app: Sphinx, name: str, source: list[str]) -> None:
    """Let ``api`` lead to the pages of the names."""
    if name == "api":
        from reference import overview

        source[0] = overview(source[0], "_reference")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _show_overview)
    app.connect("build-finished", _check_search)
