"""``lockstep show``, ``lockstep export``, and a reader for ``torch.distributed.checkpoint``."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch.distributed.checkpoint import Metadata, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from lockstep.checkpoint.folder import Manifest, excerpt, open_newest
from lockstep.checkpoint.things import saved_thing
from lockstep.errors import CheckpointMismatch, MissingExtra, SaveFailed
from lockstep.printable import printable
from lockstep.tables import FittedTable
from lockstep.tree import TensorName, decode

# Of a value that is shown, in the manifest; and the rows of a table, each of which takes 5 KB.
_MOST_SHOWN_BYTES, _MOST_ROWS = 1 << 14, 500


class DcpReader(StorageReader):
    """Lets ``torch.distributed.checkpoint.load`` read a checkpoint of :func:`lockstep.save`. ::

        state = {"model": model.state_dict()}  # of FSDP2, say
        torch.distributed.checkpoint.load(state, storage_reader=DcpReader("run"))

    Tensors have the names ``"model.layer.weight"``: a thing's, and its key. Each rank reads the
    whole of those tensors of which it needs a part.
    """

    def __init__(self, path: str | Path) -> None:
        self._manifest = open_newest(Path(path))

    def reset(self, checkpoint_id: object = None) -> None:
        """Do nothing: it reads the path that it was made with."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Return the tensors' names, dtypes and shapes."""
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        for key, (header, _) in self._manifest.entries.items():
            size = torch.Size(header.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(dtype=header.torch_dtype)
            found[key] = TensorStorageMetadata(properties, size, [whole])
        return Metadata(found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, **_: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan asks for."""
        for item in plan.items:
            part = self._manifest.read(item.storage_index.fqn)
            for dim, (start, size) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                part = part.narrow(dim, start, size)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """Leave it to torch to find another reader."""
        return False


def show(checkpoint: str) -> None:
    """Print what is in a checkpoint, of which every byte is verified."""
    manifest = open_newest(Path(checkpoint))
    facts, console = manifest.facts, Console()
    for key in manifest.entries:
        manifest.verify(key)
    summary = (
        f"{manifest.folder}: saved {facts['saved']} by {facts['ranks']} ranks, with lockstep "
        f"{facts['lockstep']} and torch {facts['torch']}; {sum(manifest.sizes):,} bytes, all as "
        "written."
    )
    console.print(Text(printable(summary)))
    _print_rows(
        console, ("thing", "kind", "value"), (_row_of(manifest, n) for n in facts["things"])
    )
    tensors = (
        [excerpt(key), excerpt([*header.shape]), header.dtype, f"{header.num_bytes:,}"]
        for key, (header, _) in manifest.entries.items()
        if not key.startswith("random.")
    )
    _print_rows(console, ("tensor", "shape", "dtype", "bytes"), tensors)


def _row_of(manifest: Manifest, name: str) -> list[str]:
    """Describe a thing, of which little is read: as objects it takes far more than in the file."""
    kind, value = manifest.thing(name)
    told = ""
    if kind == "value":
        told = f"{value.num_bytes:,} bytes of JSON"
        if value.num_bytes <= _MOST_SHOWN_BYTES:
            told = manifest.parse(lambda: reprlib.repr(decode(value.read(), TensorName)))
    return [excerpt(name), kind, told]


def _print_rows(console: Console, columns: Sequence[str], rows: Iterator[list[str]]) -> None:
    """Print a table, or several of a part of the rows each."""
    part = [*itertools.islice(rows, _MOST_ROWS)]
    while True:
        console.print(FittedTable(columns, part, texts=range(3)))
        if not (part := [*itertools.islice(rows, _MOST_ROWS)]):
            return


def export(checkpoint: str, to: str, thing: str = "model") -> None:
    """Write the tensors of one thing to a file of safetensors.

    Raises:
        MissingExtra: If safetensors isn't installed.
        CheckpointError: If there is no such thing to read, or the file can't be written.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtra(
            "lockstep export writes files with safetensors, which isn't installed. Install it by: "
            "pip install 'torch-lockstep[safetensors]'"
        ) from error
    manifest = open_newest(Path(checkpoint))
    if thing not in manifest.facts["things"]:
        raise CheckpointMismatch(
            f"There is no {thing!r} in {manifest.folder}, which has {manifest.some_names()}."
        )
    value = manifest.parse(decode, saved_thing(thing, manifest)["tree"], manifest.read)
    if isinstance(value, torch.Tensor):
        value = {thing: value}
    state = value if isinstance(value, dict) else {}
    found = {str(k): v.contiguous() for k, v in state.items() if isinstance(v, torch.Tensor)}
    if not found:
        raise CheckpointMismatch(f"{thing!r} in {manifest.folder} has no tensors by name.")
    try:
        save_file(found, to, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        num_bytes = sum(tensor.nbytes for tensor in found.values())
        raise SaveFailed(
            f"{to} can't be written: {error}. Name a file in a folder that is there and that you "
            f"may write to, with room for {num_bytes:,} bytes. {manifest.folder} is as it was."
        ) from error
