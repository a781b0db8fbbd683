"""Do what ``docs/start.md`` says, as somebody does who has nothing but that page.

    python tests/stranger.py

In a new virtual environment, in an empty folder: each block of shell lines is run, and each block
of Python becomes a part of the file that the page says to save it as. Nothing of the page is
repeated here. The checkout that the page installs is this one. Then it is the environment for
``tests/without_extras.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCKS = re.compile(r"^```(?P<kind>python|shell)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`(\w+\.py)`")
# It tells by its exit code whether all is well with the machine.
MAY_FAIL = ("lockstep doctor",)


def run(command: str, folder: Path, environment: dict[str, str]) -> None:
    began = time.monotonic()
    print(f"$ {command}", flush=True)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment)
    print(f"({time.monotonic() - began:.1f} s)", flush=True)
    if done.returncode and not command.startswith(MAY_FAIL):
        sys.exit(f"docs/start.md says to run {command!r}, whose exit code is {done.returncode}.")


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        folder = home / "work"
        folder.mkdir()
        (folder / "lockstep").symlink_to(ROOT)
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{home / 'venv' / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
            "PIP_QUIET": "1",
        }
        page = (ROOT / "docs" / "start.md").read_text()
        end, name, num_blocks = 0, None, 0
        for block in BLOCKS.finditer(page):
            named = FILE.findall(page, end, block.start())
            name, end = named[-1] if named else name, block.end()
            num_blocks += 1
            if block["kind"] == "python":
                assert name is not None, "the page doesn't say where to save its program"
                with open(folder / name, "a") as file:
                    file.write(block["text"])
                continue
            for line in block["text"].splitlines():
                run(line.partition("#")[0].strip(), folder, environment)
        if name is not None:  # what was added last
            run(f"lockstep run -n 2 {name}", folder, environment)
        run(f"python {ROOT / 'tests' / 'without_extras.py'}", folder, environment)
        assert num_blocks > 3, "the page has no blocks any more"


if __name__ == "__main__":
    main()
