"""``explain(model)``: what is split, copied and reduced, in words and as numbers.

``lockstep explain SCRIPT`` does it for the models of a program, after two steps.
"""

from __future__ import annotations

import io
import os
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.arguments import divided_by_torch
from lockstep.comm import backend_name
from lockstep.data import cuts
from lockstep.errors import ModelError
from lockstep.grad import DeferredParameter, describe_buckets
from lockstep.nn import (
    DataParallel,
    SyncBatchNorm,
    are_parallel,
    parallel_modules,
    refusal_of_divided,
    scatter,
    state_of,
)
from lockstep.observe.words import overlap_of
from lockstep.tables import FittedTable
from lockstep.torch_private import _BatchNorm
from lockstep.world import init, pages_in_large_blocks

_WIDTH = 100
_MIB = 2**20
# A gradient of less than this isn't worth a finding.
_LITTLE_BYTES = 4 * _MIB
# The C library maps each block of more than this anew.
_MAPPED_BYTES = 32 * _MIB
# After the first step gradients are put into buckets anew.
_NUM_STEPS = 2
_NO_MODEL = (
    "The program has no parallel model. Give it one: model = lockstep.parallelize(model), after "
    "lockstep.init()."
)
_POLICIES = {
    "rank0": "rank 0's values go to all ranks with each backward that reduces gradients",
    "mean": "the mean over the ranks, with each backward that reduces gradients",
    "late": "the mean over the ranks, in lockstep.sync_buffers() alone",
    "local": "each rank's own",
}


class Explanation:
    """What :func:`explain` has found; ``print`` shows it, and notebooks do.

    Attributes:
        facts: All of it, as :meth:`to_dict` returns it.
    """

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts

    def to_dict(self) -> dict[str, Any]:
        """Return everything as numbers, texts, lists and dicts, for JSON or for a test.

        The keys are ``model``, ``kind``, ``ranks``, ``inputs``, ``parameters``, ``buffers``,
        ``buckets``, ``bytes_per_step``, ``overlap`` and ``unusual``; sizes are in bytes. Bytes of
        ``rows``, of sparse gradients, are those of the last backward.
        """
        return self.facts

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=_WIDTH, highlight=False).print(self)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"<Explanation of {self.facts['model']}>"

    def _repr_html_(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH, highlight=False, record=True)
        console.print(self)
        return console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield paragraphs and tables."""
        facts = self.facts
        yield f"[bold]{escape(facts['summary'])}[/bold]"
        for one in facts["inputs"]:
            parts = ", ".join(f"{n:,}" for n in one["rows"]) if one["rows"] else "whole"
            who = "replicas" if facts["kind"] == "DataParallel" else "ranks"
            yield f"{one['name']} {tuple(one['shape'])}: rows by {who}: {parts}"
        if facts["buckets"]:
            rows = [
                [str(b["index"]), f"{b['bytes']:,}", _range_of(b["parameters"]), b["when"]]
                for b in facts["buckets"]
            ]
            columns = "bucket", "bytes", "gradients", "when"
            yield FittedTable(columns, rows, "All-reduces of a step", texts=(0, 2, 3))
        by_how: dict[str, list[str]] = defaultdict(list)
        for kind in ("parameters", "buffers"):
            for one in facts[kind]:
                if one.get("bucket") is None:
                    by_how[one["how"]].append(one["name"])
        for how, names in by_how.items():
            yield f"[bold]{escape(_range_of(names))}[/bold]: {escape(how)}."
        for same in facts["shared"]:
            yield f"[bold]{escape(' = '.join(same))}[/bold]: one parameter, reduced once."
        sizes = [f"{name} {n:,}" for name, n in facts["bytes_per_step"].items() if n]
        if sizes:
            moved = "that each rank sends in a backward"
            moved = "moved in a step" if facts["kind"] == "DataParallel" else moved
            yield f"Bytes {moved}: {', '.join(sizes)}.{_about_bytes(facts)}"
        yield facts["overlap"]
        for finding in facts["unusual"]:
            yield f"[bold]note[/bold]  {escape(finding['what'])}\n      {escape(finding['mend'])}"


def explain(model: nn.Module, *inputs: Any) -> Explanation:
    """Tell what is split, where parameters and buffers live, and how they are kept in step. ::

        model = lockstep.parallelize(Net())
        print(lockstep.explain(model, torch.empty(128, 3, 32, 32)))

    It runs nothing and communicates nothing, so that one rank may call it alone. Before the first
    step it tells what that will do; the second one puts gradients into buckets anew, in the order
    in which they have come.

    Args:
        model: One that was given to :func:`parallelize`, a wrapper, a :class:`DataParallel`, or one
            that isn't parallel.
        inputs: Examples of its inputs: for a parallel model of the whole global batch, as
            :class:`lockstep.DataLoader` shares it out.

    Returns:
        An :class:`Explanation`, for ``print``, a notebook, or as a dict.

    Raises:
        TypeError: If ``model`` isn't a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain() takes a module, and got a {type(model).__name__}.")
    if isinstance(model, DataParallel):
        return Explanation(_of_replicas(model, inputs))
    try:
        state = state_of(model)
    except ModelError:
        return Explanation(_of_plain(model))
    return Explanation(_of_ranks(model, state, inputs))


def _of_ranks(model: nn.Module, state: Any, inputs: Sequence[Any]) -> dict[str, Any]:
    module = state.module()
    module = getattr(module, "module", module) if state.is_wrapped else module
    engines = state.engines
    group = engines[0].process_group if engines else None
    num_ranks = 1 if group is None else group.size()
    facts = _empty(model, "parallelize" if module is model else type(model).__name__)
    device = _device_of(module)
    facts["ranks"] = {
        "world_size": num_ranks,
        "rank": 0 if group is None else group.rank(),
        "backend": None if group is None else backend_name(group, _devices_of(module)[0]),
        "device": device,
    }
    kept = f"kept in step by {num_ranks} ranks" if num_ranks > 1 else "trained by one rank"
    over = f" over {facts['ranks']['backend']}" if group is not None else ""
    facts["summary"] = (
        f"{type(module).__name__}, {_count(module)}, {kept}{over}; this is "
        f"rank {facts['ranks']['rank']}, on {device}."
    )
    facts["inputs"] = [*_split(inputs, num_ranks)]
    prefixes = {id(part): f"{path}." if path else "" for path, part in module.named_modules()}
    where: dict[str, int] = {}
    sparse: set[int] = set()
    policies: dict[int, str] = {}
    for engine in engines:
        prefix = prefixes.get(id(engine.module), "")
        for bucket in describe_buckets(engine.reducer):
            names = [prefix + name for name in bucket.parameter_names]
            index = len(facts["buckets"])
            where |= dict.fromkeys(names, index)
            facts["buckets"].append(
                {
                    "index": index,
                    "bytes": bucket.sent_bytes,
                    "parameters": names,
                    "is_deferred": bucket.is_deferred,
                    "is_by_rows": bucket.is_by_rows,
                    "is_hooked": engine.reducer.comm_hook is not None,
                }
            )
        sparse |= {*map(id, engine.reducer.table.sparse_parameters)}
        for policy in _POLICIES:
            policies |= {id(b): policy for b in engine.buffers.named(policy).values()}
    is_alone = "there is one rank, and nothing is sent"
    followers = {id(t) for engine in engines for t in engine.tensors_in_step()}
    is_early = all(engine.num_backwards > 1 for engine in engines)
    _tell_when(facts["buckets"], is_early)
    for name, parameter in module.named_parameters():
        number = where.get(name)
        how = _how(parameter, number, sparse, followers) if engines else is_alone
        if number is not None and facts["buckets"][number]["is_by_rows"]:
            how += ", of which the rows travel that any rank has looked up"
        facts["parameters"].append(_fact(name, parameter) | {"how": how, "bucket": number})
    for name, buffer in module.named_buffers():
        how = _POLICIES[policies.get(id(buffer), "local")] if num_ranks > 1 else _POLICIES["local"]
        facts["buffers"].append(_fact(name, buffer) | {"how": how})
    facts["shared"] = [*_shared(module)]
    facts["bytes_per_step"] = {
        "gradients": sum(bucket["bytes"] for bucket in facts["buckets"]),
        "rows": sum(sum(engine.reducer.table.row_bytes.values()) for engine in engines),
        "buffers": sum(
            b.nbytes for b in module.buffers() if policies.get(id(b)) in ("rank0", "mean")
        ),
    }
    facts["overlap"] = overlap_of(facts["buckets"], is_early, facts["bytes_per_step"]["rows"])
    facts["unusual"] = [*_unusual(module, facts)] if num_ranks > 1 else []
    return facts


def _empty(model: nn.Module, kind: str) -> dict[str, Any]:
    lists: dict[str, Any] = {"inputs": [], "parameters": [], "buffers": [], "buckets": []}
    return {
        "model": type(model).__name__,
        "kind": kind,
        "ranks": {},
        **lists,
        "shared": [],
        "bytes_per_step": {},
        "overlap": "",
        "unusual": [],
    }


def _of_plain(model: nn.Module) -> dict[str, Any]:
    facts = _empty(model, "plain")
    facts["parameters"] = [
        _fact(name, p) | {"how": divided_by_torch(p) or "each rank's own", "bucket": None}
        for name, p in model.named_parameters()
    ]
    facts["summary"] = (
        f"{type(model).__name__}, {_count(model)}, isn't parallel: each rank would train its own."
    )
    facts["overlap"] = "Nothing is sent. lockstep.parallelize(model) keeps it in step."
    if divided := refusal_of_divided(model):
        facts["summary"] = (
            f"{type(model).__name__}, {_count(model)}, is divided among ranks by torch."
        )
        facts["overlap"] = str(divided)
    elif any(are_parallel(model.parameters())):
        facts["overlap"] = "Parts of it, or a model around it, are parallel: explain that one."
    return facts


def _of_replicas(model: DataParallel, inputs: Sequence[Any]) -> dict[str, Any]:
    module, devices = model.module, [torch.device(d) for d in model.device_ids]
    facts = _empty(model, "DataParallel")
    facts["ranks"] = {"world_size": len(devices), "devices": [*map(str, devices)]}
    facts["summary"] = (
        f"{type(module).__name__}, {_count(module)}, in {len(devices)} replicas on "
        f"{', '.join(map(str, devices))}: the first in the caller's thread, the others in threads "
        "of their own."
    )
    for index, value in enumerate(inputs):
        parts = scatter((value,), devices, model.dim)
        if isinstance(value, torch.Tensor) and value.dim():
            rows = [part[0].shape[model.dim] for part in parts]
            facts["inputs"].append(_input(index, value, rows))
    num_bytes = sum(p.nbytes for p in module.parameters())
    others = {str(device) for device in devices} - {str(devices[0])}
    shared = "are the module's own memory" if not others else f"are copied to {len(others)} devices"
    for name, parameter in module.named_parameters():
        how = f"in all replicas; they {shared}, and their gradients are added up in replica order"
        facts["parameters"].append(_fact(name, parameter) | {"how": how, "bucket": None})
    for name, buffer in module.named_buffers():
        kept = "the first replica's" if model.buffer_policy == "first" else "the replicas' mean"
        facts["buffers"].append(_fact(name, buffer) | {"how": f"after a forward {kept} stays"})
    facts["shared"] = [*_shared(module)]
    facts["bytes_per_step"] = {
        "copies of parameters": num_bytes * len(others),
        "gradients of replicas": num_bytes * (len(devices) - 1),
    }
    facts["overlap"] = (
        f"Outputs are joined along dimension {model.dim} on {torch.device(model.output_device)}. "
        "The replicas' backwards run at the same time."
    )
    if devices[0].type == "cpu" and len(devices) > 1:
        facts["unusual"].append(
            {
                "what": "Replicas in threads take turns in Python: only operators run at once.",
                "mend": "launch() and parallelize() give each device an interpreter of its own.",
            }
        )
    return facts


def _fact(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name,
        "shape": [*tensor.shape],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "bytes": tensor.shape.numel() * tensor.dtype.itemsize,
        "device": str(tensor.device),
    }


def _input(index: int, value: torch.Tensor, rows: list[int]) -> dict[str, Any]:
    return {"name": f"inputs[{index}]", "shape": [*value.shape], "rows": rows}


def _split(inputs: Sequence[Any], num_ranks: int) -> Iterator[dict[str, Any]]:
    for index, value in enumerate(inputs):
        if isinstance(value, torch.Tensor):
            bounds = cuts(value.shape[0], (1,) * num_ranks) if value.dim() else ()
            yield _input(index, value, [stop - start for start, stop in pairwise(bounds)])


def _how(parameter: nn.Parameter, bucket: int | None, sparse: set[int], followers: set[int]) -> str:
    if id(parameter) in sparse:
        return "rows only: the ranks exchange the rows of which any rank has a gradient"
    if bucket is not None and isinstance(parameter, DeferredParameter):
        return f"bucket {bucket}: summed by the rank that updates it, in a sharded optimizer"
    if bucket is not None:
        return f"bucket {bucket}: rank 0's value at the start, then the mean of all gradients"
    if id(parameter) in followers and not parameter.requires_grad:
        return "frozen: rank 0's value at the start, and nothing is sent afterwards"
    return "ignored: each rank's own"


def _about_bytes(facts: dict[str, Any]) -> str:
    """Say what the bytes of sparse rows are, and what isn't known of the model alone."""
    sparse = [one["name"] for one in facts["parameters"] if one["how"].startswith("rows only")]
    words = ""
    if sparse and facts["bytes_per_step"].get("rows"):
        words = " Rows are those of the last backward; each step sends those of its batch."
    elif sparse:
        words = f" The rows of {_range_of(sparse)} come to that, as many as a batch has."
    if any(bucket["is_hooked"] for bucket in facts["buckets"]):
        words += " They are given to a communication hook; what that sends isn't known."
    if any(bucket["is_deferred"] for bucket in facts["buckets"]):
        words += " Parameters that a sharded optimizer sends after its step aren't among them."
    return words


def _tell_when(buckets: list[dict[str, Any]], is_early: bool) -> None:
    for bucket in buckets:
        is_last = bucket is buckets[-1]
        early = f"when the gradient of {bucket['parameters'][-1]} has come" if not is_last else ""
        bucket["when"] = early if is_early and early else "at the end of the backward"


def _unusual(module: nn.Module, facts: dict[str, Any]) -> Iterator[dict[str, str]]:
    total = facts["bytes_per_step"]["gradients"]
    buckets = facts["buckets"]
    for path, part in module.named_modules():
        if (
            isinstance(part, _BatchNorm)
            and not isinstance(part, SyncBatchNorm | nn.SyncBatchNorm)
            and part.track_running_stats
        ):
            yield {
                "what": f"{path or 'The model'} is a {type(part).__name__}, with statistics of "
                "each rank's part of the batch: the result isn't that of one process.",
                "mend": "lockstep.SyncBatchNorm.convert_sync_batchnorm(model) has those of all.",
            }
            break
    tied = {name for names in facts["shared"] for name in names}
    by_rows = {name for bucket in buckets if bucket["is_by_rows"] for name in bucket["parameters"]}
    sent = {one["name"] for one in facts["parameters"] if one["bucket"] is not None} - by_rows
    for name, parameter in module.named_parameters():
        part = module.get_submodule(name.rpartition(".")[0])
        if (
            name in sent - tied
            and isinstance(part, nn.Embedding | nn.EmbeddingBag)
            and not part.sparse
            and getattr(part, "mode", "") != "max"  # of which torch has no sparse gradients
            and parameter.nbytes > max(_LITTLE_BYTES, total / 4)
        ):
            yield {
                "what": f"{name} has {parameter.nbytes / total:.0%} of all bytes that are sent, "
                "those of rows that no sample uses too.",
                "mend": f"nn.{type(part).__name__}(..., sparse=True) sends the rows that are used, "
                "with SGD, Adagrad or SparseAdam.",
            }
    sizes = {p.nbytes: n for n, p in module.named_parameters() if n in sent and p.is_cpu}
    if sizes and max(sizes) > _MAPPED_BYTES and pages_in_large_blocks(os.environ):
        yield {
            "what": f"The gradient of {sizes[max(sizes)]} takes more than 32 MiB, which the C "
            "library gets from the kernel in each step, in pages of 4 KiB.",
            "mend": "'lockstep run' has it get huge pages: GLIBC_TUNABLES=glibc.malloc.hugetlb=1.",
        }
    if len(buckets) > 1 and total > _LITTLE_BYTES and buckets[-1]["bytes"] > total / 2:
        yield {
            "what": f"More than half of the bytes are in the last bucket, with "
            f"{_range_of(buckets[-1]['parameters'])}: nothing is left to compute meanwhile.",
            "mend": "A smaller bucket_cap_mb divides it, unless it is one parameter.",
        }
    if any(p.dtype == torch.float64 for p in module.parameters()):
        yield {
            "what": "Parameters are in float64, which takes twice the bytes and time of float32.",
            "mend": "model.float(), unless that is meant.",
        }
    if any(len({*one["rows"]}) > 1 for one in facts["inputs"]):
        yield {
            "what": "The ranks get different numbers of rows.",
            "mend": "lockstep.mean() of the losses is the mean over all of them; a mean on each "
            "rank would not be.",
        }
    ignored = [one["name"] for one in facts["parameters"] if one["how"].startswith("ignored")]
    if ignored:
        yield {
            "what": f"{_range_of(ignored)} differ between ranks as soon as they are trained.",
            "mend": "Leave them out of what is ignored, or freeze them.",
        }


def _shared(module: nn.Module) -> Iterator[list[str]]:
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    yield from (found for found in names.values() if len(found) > 1)


def _device_of(module: nn.Module) -> str:
    return ", ".join(dict.fromkeys(map(str, _devices_of(module))))


def _devices_of(module: nn.Module) -> list[torch.device]:
    return [parameter.device for parameter in module.parameters()] or [init().device]


def _count(module: nn.Module) -> str:
    parameters = [*module.parameters()]
    numel = sum(p.shape.numel() for p in parameters)
    frozen = sum(p.shape.numel() for p in parameters if not p.requires_grad)
    return f"{numel:,} parameters" + (f" ({frozen:,} frozen)" if frozen else "")


def _range_of(names: Sequence[str]) -> str:
    if len(names) < 4:
        return ", ".join(names) or "facts alone"
    return f"{names[0]} ... {names[-1]} ({len(names)})"


@contextmanager
def explaining(rank: int) -> Iterator[None]:
    """Explain the models on rank 0 after two steps, or at the program's end; then end it."""
    num_steps = 0
    told: list[None] = []

    def tell() -> None:
        told.append(None)
        if rank:
            return
        console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
        modules = parallel_modules()
        if not modules:
            console.print(_NO_MODEL)
        for module in modules:
            console.print(explain(module))

    def after_step(_: Optimizer, *rest: object) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == _NUM_STEPS and not told:
            tell()
            sys.exit(0)

    handle = register_optimizer_step_post_hook(after_step)
    try:
        yield
        if not told:
            tell()
    finally:
        handle.remove()
