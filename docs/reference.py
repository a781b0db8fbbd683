"""The reference: a page for each name that ``api.md`` lists, and ``api.md`` as their overview.

    python docs/reference.py FOLDER

``make docs`` runs it.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import lockstep

_BLOCK = re.compile(r"```\{eval-rst\}\n(\.\. auto\w+:: ([\w.]+)\n.*?)```\n", flags=re.DOTALL)


def _first_line(name: str) -> str:
    thing: object = lockstep
    for part in name.split(".")[1:]:
        thing = getattr(thing, part)
    line = (inspect.getdoc(thing) or "").partition("\n\n")[0].replace("\n", " ")
    return re.sub(r":\w+:`~?(?:lockstep\.)?([\w.]+)`", r"`\1`", line).removesuffix(" ::")


def overview(text: str, folder: str) -> str:
    """``api.md`` with a link and a line in place of each description."""
    text = _BLOCK.sub(lambda m: f"- [`{m[2]}`]({folder}/{m[2]}.md): {_first_line(m[2])}\n", text)
    names = "\n".join(f"{folder}/{name}" for name in re.findall(rf"\]\({folder}/(.*?)\.md\)", text))
    return f"{text}\n```{{toctree}}\n:hidden:\n\n{names}\n```\n"


def main(folder: Path) -> None:
    """Write the pages into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for block in _BLOCK.finditer((Path(__file__).parent / "api.md").read_text()):
        page = f"# `{block[2]}`\n\n{block[0]}"
        (folder / f"{block[2]}.md").write_text(page)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
