"""Run a script or a module as Python itself would: as ``__main__``, with its own ``sys``.

``runpy`` would do most of it, but puts the launcher's ``__main__`` back when the script ends or
raises, before its exit handlers and threads are done with theirs.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import runpy
import sys
from importlib.abc import InspectLoader
from types import CodeType, ModuleType

from lockstep.errors import BadLaunch
from lockstep.launcher.job import Module, Script, no_such_module


def run_script(script: Script) -> None:
    """Run a file, or a directory with a ``__main__.py``, as ``python path`` does."""
    path = os.path.abspath(script.path)
    sys.argv[:] = [script.path, *script.argv]
    if os.path.isdir(path):
        _replace_first_path_entry(None)
        runpy.run_path(path, run_name="__main__")
        return
    _replace_first_path_entry(os.path.dirname(os.path.realpath(path)))
    with io.open_code(path) as file:
        # dont_inherit: else the script would be compiled with this file's __future__ imports.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = _new_main(path)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    _execute(code, main)


def run_module(module: Module) -> None:
    """Run a module, or the ``__main__`` of a package, as ``python -m name`` does.

    Raises:
        BadLaunch: If there is no such module, or it can't be run.
    """
    _replace_first_path_entry(os.getcwd())
    sys.argv[:] = ["-m", *module.argv]  # what python has there while it looks for the module
    spec = _find(module.name)
    if spec.submodule_search_locations is not None:
        spec = _find(f"{module.name}.__main__", package=module.name)
    loader = spec.loader
    code = loader.get_code(spec.name) if isinstance(loader, InspectLoader) else None
    if code is None:
        raise BadLaunch(f"The module {module.name!r} isn't written in Python, so it can't be run.")
    main = _new_main(spec.origin or "")
    main.__spec__, main.__loader__, main.__package__ = spec, loader, spec.parent
    sys.argv[0] = spec.origin or ""
    _execute(code, main)


def _find(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        # An import that fails inside the user's package is the user's traceback to see.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    except ValueError:  # a module without a spec, or a name such as ".train"
        spec = None
    if spec is not None:
        return spec
    if package is not None:
        raise BadLaunch(
            f"{package!r} is a package without a __main__ module, so it can't be run. Name one "
            f"of its modules, as in '-m {package}.train'."
        )
    raise BadLaunch(no_such_module(name))


def _new_main(path: str) -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    return main


def _execute(code: CodeType, main: ModuleType) -> None:
    exec(code, main.__dict__)


def _replace_first_path_entry(directory: str | None) -> None:
    """Put ``directory`` where Python put the launcher's own, which the program must not see."""
    if not sys.flags.safe_path:  # with -P, Python put nothing there
        sys.path[:1] = [] if directory is None else [directory]
