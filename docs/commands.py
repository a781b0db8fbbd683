"""The reference of commands: what each of them says of itself.

    python docs/commands.py FOLDER

``make docs`` runs it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

# A width at which no example is broken, and no colours.
_ENVIRONMENT = {**os.environ, "COLUMNS": "88", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}


def help_of(*command: str) -> str:
    """What ``lockstep COMMAND --help`` prints."""
    call = [sys.executable, "-m", "lockstep", *command, "--help"]
    done = subprocess.run(call, capture_output=True, text=True, check=True, env=_ENVIRONMENT)
    return done.stdout.rstrip()


def page() -> str:
    """Each command, in the order in which ``lockstep --help`` names them."""
    overview = help_of()
    names = re.findall(r"^  (\w+)  +\w", overview, flags=re.M)
    parts = [f"```text\n{overview}\n```"]
    for name in names:
        parts.append(f"## lockstep {name}\n\n```text\n{help_of(name)}\n```")
        parts += [
            f"### lockstep {name} {inner}\n\n```text\n{help_of(name, inner)}\n```"
            for inner in (["collectives"] if name == "bench" else [])
        ]
    return "\n\n".join(parts) + "\n"


def main(folder: Path) -> None:
    """Write the page into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "commands.md").write_text(page())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
