"""What :func:`lockstep.shards` keeps of a model between steps, and what their bits depend on."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lockstep.arguments import as_whole_number
from lockstep.errors import ModelError
from lockstep.nn import state_of
from lockstep.same_bits.over_ranks import EarlyChunks, SumOverRanks

Fingerprint = dict[str, Any]


def fingerprint_of(num_shards: int, devices: Iterable[torch.device] = ()) -> Fingerprint:
    """Return what has to be the same for the same bits, by name, of values that JSON has.

    ``devices`` are those with parameters.
    """
    kinds = sorted({device.type for device in devices} - {"cpu"})
    return {
        "number of shards": num_shards,
        "intra-op threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        **{f"{kind} device": _name_of_devices(kind) for kind in kinds},
    }


def _name_of_devices(kind: str) -> list[Any]:
    """The name of the current device of a kind, and what its kernels depend on."""
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda: kind)()
    cudnn = torch.backends.cudnn
    return [name, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32]


def use_threads() -> None:
    """Let operators of this process compute with one thread: of two, many give other bits."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


def difference(mine: Fingerprint, theirs: Fingerprint) -> str | None:
    """Return the name of what differs first, if anything does."""
    return next((name for name in mine if mine[name] != theirs.get(name)), None)


_log = logging.getLogger("lockstep")


class StepsInShards:
    """In the context of a group over which models have taken steps in shards."""


class StepsOfModel:
    """What is kept of one model.

    Attributes:
        num_steps: The number of steps without a loader's batch.
        fingerprint: What the bits of the last step depended on.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.fingerprint: Fingerprint = {}
        self._parts: list[int] = []  # the modules that were checked, by id()
        # For the number of shards, and the parameters by id().
        self._sums: tuple[tuple[int, list[int]], SumOverRanks] | None = None

    def are_known(self, module: nn.Module) -> bool:
        """Whether the parts of ``module`` are those of the last call."""
        before, self._parts = self._parts, [*map(id, module.modules())]
        return before == self._parts

    def note(self, fingerprint: Fingerprint, *, tells: bool) -> None:
        """Note what the bits of a step depend on; say so if it has changed since the one before.

        That may have been in another run, from whose checkpoint this one goes on.
        """
        before, self.fingerprint = self.fingerprint, fingerprint
        name = difference(fingerprint, before) if before and before != fingerprint else None
        if name is not None and tells:
            _log.warning(
                "The steps in shards before this one were taken with another %s, %r, and it is %r "
                "now: the numbers of this run aren't those of one without the change.",
                name,
                before.get(name),
                fingerprint[name],
            )

    def sums(
        self, group: dist.ProcessGroup, num_shards: int, parameters: list[nn.Parameter]
    ) -> SumOverRanks:
        """Return what sums gradients of ``parameters`` over the ranks, with memory of its own."""
        key = num_shards, [*map(id, parameters)]
        if self._sums is None or self._sums[0] != key:
            self._sums = key, SumOverRanks(group, num_shards, parameters)
        return self._sums[1]

    def early(self, num_shards: int, parameters: list[nn.Parameter]) -> EarlyChunks | None:
        """Return what ranks send before they have told each other of a step, if anything."""
        if self._sums is None:
            return None
        early = self._sums[1].early
        early.open()
        return early if self._sums[0] == (num_shards, [*map(id, parameters)]) else early.voided()


def steps_of(module: nn.Module) -> dict[str, Any] | None:
    """Return, for a checkpoint, what is known of the steps in shards of ``module``, if any."""
    try:
        kept = state_of(module).context.find(StepsOfModel)
    except ModelError:  # it isn't parallel
        return None
    if kept is None or not kept.fingerprint:
        return None
    return {"fingerprint": kept.fingerprint, "num_steps": kept.num_steps}


def continue_steps(module: nn.Module, steps: dict[str, Any]) -> None:
    """Continue with what :func:`steps_of` returned for a model, in another run maybe."""
    try:
        kept = state_of(module).context.get(StepsOfModel)
    except ModelError:
        return
    kept.fingerprint = {**steps["fingerprint"]}
    kept.num_steps = as_whole_number("num_steps", steps["num_steps"], at_least=0)
