"""Packages that only some of the demo's data needs."""

from __future__ import annotations

import importlib
from types import ModuleType

from lockstep.errors import MissingExtra


def require(module: str, package: str, *, extra: str) -> ModuleType:
    """Import a module of an optional dependency.

    Args:
        module: The module to import, such as ``"sklearn.datasets"``.
        package: What it is called where it is installed from, such as ``"scikit-learn"``.
        extra: The extra of torch-lockstep that installs it.

    Raises:
        MissingExtra: If it can't be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{package} is needed for this data and can't be imported ({error}). "
            f"Install it with: pip install 'torch-lockstep[{extra}]'"
        ) from error
