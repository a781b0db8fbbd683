"""Do what README, ``docs/start.md`` and some how-tos say, as somebody does who has only these.

    python tests/stranger.py

In a new virtual environment, in an empty folder: each block of shell lines is run, and each block
of Python becomes a part of the file that the page says to save it as. Nothing of the pages is
repeated here. The checkout that they install is this one; of what it needs torch alone is pinned,
of which the newest would be a build for GPUs of some gigabytes. Then it is the environment for
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
README, START = ROOT / "README.md", ROOT / "docs" / "start.md"
HOW_TOS = [ROOT / "docs" / f"{name}.md" for name in ("validation", "gan", "padding")]
BLOCKS = re.compile(r"^```(?P<kind>python|shell|)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`(\w+\.py)`|(?:run|python)[^\n]* (\w+\.py)")
# It tells by its exit code whether all is well with the machine.
MAY_FAIL = ("lockstep doctor",)
# Other targets of .ci/run and of the workflow.
OF_A_CHECKOUT = ("make ",)


def run(command: str, folder: Path, environment: dict[str, str], page: Path) -> None:
    began = time.monotonic()
    print(f"$ {command}", flush=True)
    done = subprocess.run(command, shell=True, cwd=folder, env=environment)
    print(f"({time.monotonic() - began:.1f} s)", flush=True)
    if done.returncode and not command.startswith(MAY_FAIL):
        sys.exit(f"{page.name} says to run {command!r}, whose exit code is {done.returncode}.")


def follow(page: Path, folder: Path, environment: dict[str, str]) -> None:
    """Do what the page says in ``folder``, in which ``lockstep`` is the checkout."""
    print(f"== {page.relative_to(ROOT)}", flush=True)
    text = page.read_text()
    end, name, num_blocks, is_run = 0, f"{page.stem}.py", 0, True
    if (said := FILE.search(text)) is not None:
        name = said[1] or said[2]
    for block in BLOCKS.finditer(text):
        named = [found[1] for found in FILE.finditer(text, end, block.start()) if found[1]]
        name, end = named[-1] if named else name, block.end()
        num_blocks += 1
        if block["kind"] == "python":
            with open(folder / name, "a") as file:
                file.write(block["text"])
            is_run = False
            continue
        for line in block["text"].splitlines():
            command = line.partition("#")[0].strip()
            if command.startswith(OF_A_CHECKOUT):
                continue
            is_of_checkout = command == "pip install ."
            run(command, folder / "lockstep" if is_of_checkout else folder, environment, page)
            is_run |= name in command
    if not is_run:  # what was added last
        run(f"lockstep run -n 2 {name}", folder, environment, page)
    assert num_blocks, f"{page} has no blocks any more"


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        subprocess.run([sys.executable, "-m", "venv", home / "venv"], check=True)
        pinned = [*re.findall("^torch==.*", (ROOT / "constraints.txt").read_text(), re.M)]
        (home / "constraints.txt").write_text("\n".join(pinned) + "\n")
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "PATH": f"{home / 'venv' / 'bin'}:{os.environ['PATH']}",
            "PIP_CONSTRAINT": str(home / "constraints.txt"),
            "PIP_QUIET": "1",
        }
        for number, page in enumerate([README, START, *HOW_TOS]):
            folder = home / str(number)
            folder.mkdir()
            (folder / "lockstep").symlink_to(ROOT)
            follow(page, folder, environment)
        run(f"python {ROOT / 'tests' / 'without_extras.py'}", folder, environment, START)


if __name__ == "__main__":
    main()
