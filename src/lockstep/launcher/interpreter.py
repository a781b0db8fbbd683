"""Commands that start this interpreter anew, as it was started, and call something."""

from __future__ import annotations

import json
import sys

# This interpreter's options, which another one has as well, and as often: there is -OO.
_FLAGS = {
    "safe_path": "P",
    "optimize": "O",
    "dont_write_bytecode": "B",
    "ignore_environment": "E",
    "no_user_site": "s",
}
_MAIN = """\
import importlib, json, sys
sys.path[:] = json.loads(sys.argv.pop(1))
sys.exit(importlib.import_module(sys.argv.pop(1)).main())
"""


def command_of(module: str, *arguments: str) -> list[str]:
    """The command by which a fresh interpreter exits with what ``main()`` of a module returns.

    Args:
        module: Its name; it is looked for where this process would look.
        arguments: What it finds in ``sys.argv`` from 1 on.
    """
    options = [f"-W{option}" for option in sys.warnoptions]
    for name, value in sys._xoptions.items():
        options.append(f"-X{name}" if value is True else f"-X{name}={value}")
    flags = ((letter, getattr(sys.flags, name)) for name, letter in _FLAGS.items())
    options += ["-" + letter * times for letter, times in flags if times]
    return [sys.executable, *options, "-c", _MAIN, json.dumps(sys.path), module, *arguments]
