"""However a checkpoint was crafted, reading it takes twice its files in memory, and few MB."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.checkpoint import show
from lockstep.errors import CheckpointError
from tests.checkpoint.crafted import facts_of, put_body
from tests.memory import FIXED_BYTES, peak_of

_EMPTY = '[["int8",[0],[0]],[]]'
_ZEROS = zlib.crc32(bytes(64))


def _tensors(number: int) -> str:
    """Tensors of an element each."""
    return ",".join(
        f'"{n:x}":[["int8",[1],[0]],[[0,1,0,{64 * n},{_ZEROS}]]]' for n in range(number)
    )


def _pieces(number: int) -> str:
    """A tensor of pieces of an element each."""
    pieces = ",".join(f"[{n},{n + 1},0,{64 * n},{_ZEROS}]" for n in range(number))
    return f'"x":[["int8",[{number}],[0]],[{pieces}]]'


def _things(number: int, tree: str = "0") -> str:
    return ",".join(f'"{n:x}":{{"kind":"value","tree":{tree}}}' for n in range(number))


def _thing(tree: str) -> str:
    return f'"x":{{"kind":"value","tree":{tree}}}'


# What each member of a manifest may have, as JSON without its braces, by a number that it grows by.
KINDS: dict[str, tuple[str, Callable[[int], str]]] = {
    "empty lists": ("things", lambda n: _thing("[" + "[]," * n + "[]]")),
    "empty lists that are a kind": (
        "things",
        lambda n: '"x":{"kind":[' + "[]," * n + '[]],"tree":0}',
    ),
    "empty objects": ("things", lambda n: _thing('{"pairs":[' + "{}," * n + "{}]}")),
    "numbers": ("things", lambda n: _thing("[" + "1.5," * n + "0]")),
    "members": (
        "things",
        lambda n: _thing('{"dict":{' + ",".join(f'"{k:x}":0' for k in range(n)) + "}}"),
    ),
    "depth": ("things", lambda n: _thing("[" * n + "]" * n)),
    "text": ("things", lambda n: _thing('"' + "\\n" * n + '"')),
    "text of wide characters": ("things", lambda n: _thing('"' + "\U0001f600" * n + '"')),
    "small things": ("things", _things),
    "things that are texts": ("things", lambda n: _things(n, '"' + "x" * 90 + '"')),
    "a long name": ("things", lambda n: f'"{"x" * n}":{{"kind":"value","tree":0}}'),
    "members of a thing": (
        "things",
        lambda n: '"x":{' + ",".join(f'"{k:x}":0' for k in range(n)) + ',"kind":"value","tree":0}',
    ),
    "empty tensors": ("tensors", lambda n: ",".join(f'"{k:x}":{_EMPTY}' for k in range(n))),
    "small tensors": ("tensors", _tensors),
    "small pieces": ("tensors", _pieces),
    "empty pieces": ("tensors", lambda n: '"x":[["int8",[0],[0]],[' + "[0,0,0,0,0]," * n + "[]]]"),
    "dimensions": (
        "tensors",
        lambda n: f'"x":[["int8",[{",".join(["0"] * n)}],[{",".join(map(str, range(n)))}]],[]]',
    ),
    "a tensor's long name": ("tensors", lambda n: f'"{"x" * n}":{_EMPTY}'),
    "a long dtype": ("tensors", lambda n: f'"x":[["{"x" * n}",[0],[0]],[]]'),
    "divided": ("divided", lambda n: '"x":{"0":[' + "[]," * n + "[]]}"),
    "random states": ("random", lambda n: "0," * n + "0"),
    "ranks": ("bytes", lambda n: "0," * n + "0"),
    "a long version": ("lockstep", lambda n: "x" * n),
    "a large number": ("ranks", lambda n: "1" * n),
    "other members": ("other", lambda n: "[]," * n + "[]"),
}
# Others have braces.
_BRACKETS = {"random": "[]", "bytes": "[]", "lockstep": '""', "ranks": ("", ""), "other": "[]"}


def craft(checkpoint: Path, kind: str, number: int) -> int:
    """Change a member of the manifest, and the files to what it then says; return their bytes."""
    name, text = KINDS[kind][0], KINDS[kind][1](number)
    facts = {key: json.dumps(value) for key, value in facts_of(checkpoint).items()}
    left, right = _BRACKETS.get(name, "{}")
    facts[name] = left + text + right
    num_pieces = number if kind in ("small tensors", "small pieces") else 0
    if name == "tensors":
        facts |= {"things": "{}", "random": "[0]", "bytes": f"[{64 * num_pieces}]"}
        (checkpoint / "rank-0.bin").write_bytes(bytes(64 * num_pieces))
    if name in ("random", "bytes"):
        facts |= dict.fromkeys(("random", "bytes"), facts[name])
    body = ",".join(f'"{key}":{value}' for key, value in facts.items())
    put_body(checkpoint, f"{{{body}}}".encode())
    return sum(path.stat().st_size for path in checkpoint.iterdir())


# Of which many rows are shown, or which Python gives up late.
_SLOW = {"small things", "things that are texts", "empty tensors", "small tensors", "depth"}
_SOON = {"empty lists", "members", "small pieces", "dimensions", "divided", "a long version"}


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        *(pytest.param(k, 200_000, marks=[pytest.mark.long] * (k not in _SOON)) for k in KINDS),
        *(pytest.param(k, 2_000_000, marks=pytest.mark.thorough) for k in KINDS if k not in _SLOW),
    ],
)
def test_a_crafted_checkpoint_is_shown_or_refused_in_twice_its_size(
    kind: str, num_bytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = lockstep.save(tmp_path / "run", value=torch.ones(3))
    show(str(path))  # so that what it caches is there
    put = facts_of(path)
    number = 1
    while (size := craft(path, kind, number)) < num_bytes:
        number *= 2
        put_body(path, json.dumps(put).encode())

    def read() -> None:
        with suppress(CheckpointError):
            show(str(path))

    peak = peak_of(read)
    capsys.readouterr()
    assert peak < 2 * size + FIXED_BYTES, (peak / size, peak)
