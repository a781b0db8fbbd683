"""``lockstep doctor``: what is on this machine, what ``init()`` makes of it, and what is wrong.

Facts are gathered first, and judged by :func:`findings`, a pure function.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lockstep.comm import SHM
from lockstep.errors import LaunchError
from lockstep.launcher import check_num_ranks, check_num_threads, launch
from lockstep.observe.machine import Machine, look
from lockstep.world import Starter, World, backend_of, choose_backend, choose_device

_GIB, _MIB = 2**30, 2**20
# Kinds of devices that are called so; an accelerator of another kind has its own name.
_KINDS_OF_GPUS = ("cuda", "xpu", "mps")
_FEW_FILES = 256
# What PyTorch's workers of a DataLoader hand over goes through /dev/shm; Docker gives 64 MiB.
_LITTLE_DEV_SHM, _LITTLE_MEMORY = 256 * _MIB, _GIB
_NUM_CALLS = 20
_SIZES = {"4 KiB": 4 * 1024, "16 MiB": 16 * _MIB}


class Finding(NamedTuple):
    """What is wrong or worth knowing, and how to mend it."""

    is_wrong: bool
    what: str
    mend: str


class TriedStart(NamedTuple):
    """What happened when ranks were started and met."""

    seconds: float  # until all had started, met and ended
    micros: dict[str, float]  # by size, the median time of an all-reduce
    error: str = ""


class Choice(NamedTuple):
    """What ``init()`` chooses for ranks of this host, and why."""

    num_ranks: int
    num_threads: int
    device: str  # the kind
    backend: str
    reason: str


def doctor(nprocs: str | None = None, as_json: bool = False) -> bool:
    """Print what lockstep finds on this machine; start some ranks and let them meet.

    Args:
        nprocs: How many ranks; by default one for each GPU, or 2.
        as_json: Whether to print one JSON object instead of tables.

    Returns:
        Whether nothing is wrong.

    Raises:
        BadLaunch: If ``nprocs`` isn't a number of ranks.
    """
    machine = look(os.environ)
    choice = choice_of(machine, check_num_ranks(nprocs) if nprocs else len(machine.gpus) or 2)
    trial = try_ranks(choice)
    found = [*findings(machine, choice, trial)]
    if as_json:
        facts = machine._asdict() | {
            "starter": machine.starter.name.lower(),
            "gpus": [gpu._asdict() for gpu in machine.gpus],
            "choice": choice._asdict(),
            "trial": trial._asdict(),
            "findings": [finding._asdict() for finding in found],
        }
        print(json.dumps(facts, indent=1))
    else:
        _print(machine, choice, trial, found)
    return not any(finding.is_wrong for finding in found)


def choice_of(machine: Machine, num_ranks: int) -> Choice:
    """Return what ``init()`` chooses for ``num_ranks`` ranks of this host that it has started."""
    num_gpus, kind, noun = len(machine.gpus), machine.kind, _noun(machine.kind)
    device = choose_device(0, num_ranks, num_gpus, one_device_per_task=False, kind=kind)
    if num_gpus and num_ranks > 1 and backend_of(kind) is None:
        device, reason = (
            torch.device("cpu"),
            f"no backend of torch.distributed carries tensors of {kind}",
        )
    elif device.type != "cpu":
        reason = f"each rank gets one of {num_gpus} {noun}s"
    elif num_gpus:
        reason = f"{num_ranks} ranks would have to share {num_gpus} {noun}s: "
        reason += f"-n {num_gpus} uses them"
    else:
        reason = "there is no GPU that torch can use"
    backend = choose_backend(device)
    if backend == SHM and machine.backends[SHM]:
        backend, reason = "gloo", f"shm can't be used: {machine.backends[SHM]}"
    elif backend == SHM:
        reason += ", and ranks of one Linux host share memory"
    num_threads = check_num_threads(None, num_ranks)
    return Choice(num_ranks, num_threads, device.type, backend, reason)


def _noun(kind: str) -> str:
    return "GPU" if kind in _KINDS_OF_GPUS else f"{kind} device"


def try_ranks(choice: Choice) -> TriedStart:
    """Start the ranks, and time an all-reduce of a small and of a large tensor."""
    before = time.perf_counter()
    try:
        by_rank = launch(_time_all_reduces, choice.num_ranks, output="plain")
    except LaunchError as error:
        return TriedStart(time.perf_counter() - before, {}, str(error))
    seconds = time.perf_counter() - before
    return TriedStart(seconds, {name: max(each[name] for each in by_rank) for name in _SIZES})


def _time_all_reduces(world: World) -> dict[str, float]:
    group = world.process_group
    found = {}
    for name, num_bytes in _SIZES.items():
        tensor = torch.ones(num_bytes // 4, device=world.device)
        times = []
        for _ in range(_NUM_CALLS if group is not None else 0):
            begin = time.perf_counter()
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
            if world.device.type != "cpu":
                torch.accelerator.synchronize()
            times.append(time.perf_counter() - begin)
        found[name] = statistics.median(times or [0.0]) * 1e6
    return found


def findings(machine: Machine, choice: Choice, trial: TriedStart) -> Iterator[Finding]:
    """Yield what is wrong, and what is worth knowing."""
    if trial.error:
        yield Finding(
            True,
            f"{choice.num_ranks} ranks could not be started, or not meet: {trial.error}",
            "It is the message of the first rank that failed. The rest of this list may tell why.",
        )
    yield from _of_starters(machine)
    yield from _of_gpus(machine, choice)
    yield from _of_processors(machine, choice)
    yield from _of_memory(machine)
    if _is_outside(machine.versions["torch"], machine.requirement):
        yield Finding(
            False,
            f"lockstep is tested with {machine.requirement}, and this is torch "
            f"{machine.versions['torch']}.",
            "Should something fail that has worked before, take a torch of that range.",
        )
    if not machine.address:
        yield Finding(
            False,
            f"The name of this host, {machine.host}, has no address, so ranks of other hosts may "
            "not find it.",
            "Put it into /etc/hosts or the DNS, or give --rdzv-endpoint an address.",
        )


def _of_starters(machine: Machine) -> Iterator[Finding]:
    if machine.starter_error:
        yield Finding(True, f"init() would fail in this shell: {machine.starter_error}", "See it.")
    elif machine.starter is Starter.TORCHRUN:
        yield Finding(
            True,
            f"RANK={machine.variables['RANK']} and "
            f"WORLD_SIZE={machine.variables['WORLD_SIZE']} are set in this shell. "
            "A script that is started by `python` takes itself for one of those ranks, and waits "
            "for the others.",
            "unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT, unless "
            "this is a rank of torchrun.",
        )
    if machine.variables.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        yield Finding(
            False,
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch doesn't know the backend 'shm' before lockstep "
            "is imported.",
            "Import lockstep first, or unset the variable.",
        )


def _of_gpus(machine: Machine, choice: Choice) -> Iterator[Finding]:
    if machine.has_gpu_driver and not machine.gpus:
        if machine.cuda is None:
            what, mend = "this torch is built without CUDA", "Install a torch built for CUDA."
        elif "CUDA_VISIBLE_DEVICES" in machine.variables:
            value = machine.variables["CUDA_VISIBLE_DEVICES"]
            what = f"CUDA_VISIBLE_DEVICES={value!r} hides them"
            mend = "Unset it, or list the GPUs to use."
        else:
            what = f"torch, built for CUDA {machine.cuda}, can't use them"
            mend = (
                "Compare that version with the one that nvidia-smi shows: the driver may be older, "
                "or the container may lack the GPUs (docker run --gpus all)."
            )
        yield Finding(True, f"There are NVIDIA GPUs, but {what}.", mend)
    if len(machine.gpus) > choice.num_ranks or (machine.gpus and choice.device == "cpu"):
        yield Finding(
            False,
            f"There are {len(machine.gpus)} {_noun(machine.kind)}s, and {choice.num_ranks} ranks.",
            f"Leave -n out, or give -n {len(machine.gpus)}, to use one for each rank.",
        )
    for index, gpu in enumerate(machine.gpus):
        if gpu.unreachable:
            others = ", ".join(map(str, gpu.unreachable))
            yield Finding(
                False,
                f"GPU {index} can't reach the memory of GPU {others}: gradients between them pass "
                "through the host.",
                "`nvidia-smi topo -m` shows how they are linked; see there what could be.",
            )
    for name in ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"):
        if machine.gpus and machine.variables.get(name, "0") != "0":
            yield Finding(
                False, f"{name}={machine.variables[name]} keeps NCCL off a fast way.", "Unset it."
            )


def _of_processors(machine: Machine, choice: Choice) -> Iterator[Finding]:
    wanted = choice.num_ranks * choice.num_threads
    if choice.device == "cpu" and choice.num_ranks > machine.num_cores:
        yield Finding(
            False,
            f"{choice.num_ranks} ranks share {machine.num_cores} cores, and wait for each other.",
            f"Take at most one rank for each core: -n {machine.num_cores}.",
        )
    if machine.quota is not None and machine.quota < min(wanted, machine.num_cores):
        whole = max(1, int(machine.quota))
        yield Finding(
            True,
            f"A control group grants this process the time of {machine.quota:g} cores, though it "
            f"sees {machine.num_cores}. Ranks with more threads than that are stopped again and "
            "again, in the midst of steps.",
            f"Let ranks times threads be at most {whole}, as in -n {whole} --threads 1; or raise "
            "the limit.",
        )
    if machine.num_cores < machine.num_host_cores:
        yield Finding(
            False,
            f"This process may use {machine.num_cores} of {machine.num_host_cores} cores.",
            "If that isn't meant: `taskset -p $$`, or the scheduler's request, says which.",
        )
    if "MKL_NUM_THREADS" in machine.variables:
        value = machine.variables["MKL_NUM_THREADS"]
        yield Finding(
            value != str(choice.num_threads),
            f"MKL_NUM_THREADS={value}: matrix products take so many threads on each rank, "
            "whatever --threads says.",
            "Unset it.",
        )


def _of_memory(machine: Machine) -> Iterator[Finding]:
    if machine.room_bytes < _LITTLE_MEMORY:
        yield Finding(
            True,
            f"{machine.room_bytes / _MIB:,.0f} MiB of memory are left.",
            "End what else takes memory, or raise the limit of the control group.",
        )
    if machine.dev_shm_bytes is not None and machine.dev_shm_bytes < _LITTLE_DEV_SHM:
        yield Finding(
            True,
            f"/dev/shm has {machine.dev_shm_bytes / _MIB:,.0f} MiB. Ranks don't need it, but "
            "workers of a DataLoader hand their batches over there, and die if it is full.",
            "Make it larger, as with docker run --shm-size=8g.",
        )
    if machine.num_files is not None and machine.num_files < _FEW_FILES:
        yield Finding(
            True,
            f"A process may have {machine.num_files} files open, which ranks and workers exceed.",
            "ulimit -n 4096",
        )
    if machine.backends[SHM] == "" and not machine.shows_pages:
        yield Finding(
            False,
            "/proc/self/pagemap can't be read, so with a sharded optimizer each rank has a copy of "
            "the parameters of its own.",
            "It costs memory and some time of each step, and nothing else.",
        )


def _is_outside(version: str, requirement: str) -> bool:
    """Whether ``version`` isn't within, say, ``"torch<2.16,>=2.13"``."""
    found = _numbers(version)
    for sign, bound in re.findall(r"(>=|<)\s*([\d.]+)", requirement):
        if (found < _numbers(bound)) == (sign == ">="):
            return True
    return False


def _numbers(version: str) -> list[int]:
    return [*map(int, re.findall(r"\d+", version.partition("+")[0])[:2])]


def _print(machine: Machine, choice: Choice, trial: TriedStart, found: Sequence[Finding]) -> None:
    console = Console(highlight=False)
    table = Table.grid(padding=(0, 2))
    for name, text in _rows(machine, choice, trial):
        table.add_row(f"[bold]{name}[/bold]", escape(text))
    console.print(table)
    console.print()
    for finding in sorted(found, reverse=True):
        kind = "[bold red]wrong[/bold red]" if finding.is_wrong else "[bold]note[/bold]"
        console.print(f"{kind}  {escape(finding.what)}\n       {escape(finding.mend)}")
    if not any(finding.is_wrong for finding in found):
        console.print("[green]Nothing is wrong.[/green]")


def _rows(machine: Machine, choice: Choice, trial: TriedStart) -> Iterator[tuple[str, str]]:
    yield "versions", ", ".join(" ".join(pair) for pair in machine.versions.items())
    yield "cores", f"{machine.num_cores} of {machine.num_host_cores}"
    yield "memory", f"{machine.room_bytes / _GIB:,.1f} GiB are left"
    kind = _noun(machine.kind).removesuffix(" device")
    for index, gpu in enumerate(machine.gpus):
        memory = f", {gpu.memory_bytes / _GIB:,.0f} GiB" if gpu.memory_bytes is not None else ""
        yield f"{kind} {index}", f"{gpu.name}{memory}"
    usable = [name for name, reason in machine.backends.items() if not reason]
    lacking = [f"{name} ({reason})" for name, reason in machine.backends.items() if reason]
    yield "backends", ", ".join(usable) + (f"; not {', '.join(lacking)}" if lacking else "")
    settings = [f"{name}={value}" for name, value in machine.variables.items()]
    yield "environment", ", ".join(settings) or "nothing that matters"
    yield "started by", machine.starter_error or machine.starter.value
    threads = "one thread" if choice.num_threads == 1 else f"{choice.num_threads} threads"
    ranks = "1 rank" if choice.num_ranks == 1 else f"{choice.num_ranks} ranks"
    yield (
        "init()",
        f"on {ranks} of this host, of {threads} each, chooses {choice.device} and "
        f"{choice.backend}: {choice.reason}",
    )
    if trial.error:
        yield "trial", "failed"
        return
    times = [f"an all-reduce of {name} {micros:,.0f} us" for name, micros in trial.micros.items()]
    if choice.num_ranks == 1:
        times = []
    yield "trial", ", ".join([f"starting, meeting and ending took {trial.seconds:.1f} s", *times])
