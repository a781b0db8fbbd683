"""The command ``lockstep``.

It answers at once: torch isn't imported here, nor by anything that is imported here. Nor is
the library that reads command lines, which takes a tenth of the time in which ranks start: a
plain ``lockstep run`` is read without it, see :func:`~lockstep.cli.plain.plain_run`.
"""

from __future__ import annotations

import sys

from lockstep.cli.plain import plain_run
from lockstep.errors import LockstepError

__all__ = ["main"]


def main() -> None:
    """Run the command; what goes wrong for a reason that we know is said in one paragraph."""
    try:
        options = plain_run(sys.argv[1:])
        if options is None:
            from lockstep.cli.app import app

            app()
        else:
            from lockstep.cli.running import run

            run(options)
    except LockstepError as error:
        print(f"lockstep: {error}", file=sys.stderr)
        sys.exit(2)
