"""What modules keep and change, that no object owns."""

from __future__ import annotations

import ast

import pytest

from tests.module_state import changed_constants, state_of
from tests.source import (
    FILES,
    MODULES,
)

# What they keep, and why. Whoever adds some says why here.
MODULE_STATE = {
    # By process group and by rank.
    "comm.context._contexts": "the contexts of all groups: torch's groups take no attributes",
    "comm.threads.ranks._current": "the rank that a thread is, or works for",
    "comm.started._waited": "a thread's time in collectives, whichever group they are of",
    "world.world._of_process": "what init() has returned, which needs no argument",
    # By what takes no attribute, as it is to pickle and copy as before.
    "nn.parallel_state._states": "by module, what parallelize() knows of it",
    "guarding.step._commons": "by optimizer, steps skipped in a row, and memory for copies",
    "world.apart._watched": "by optimizer, its steps that were compared",
    "world.told._told": "by parameter, whether a rank was told that nothing keeps it in step",
    "guarding.context._current": "a thread's guard, in which no other one may be entered",
    "guarding.entry._checksum": "a checksum of what is the same in each step, and long to write",
    # What is the process's: torch's hooks, forks, its exit, ports, memory.
    "nn.forward_hooks._handles": "torch's hooks for all modules and optimizers, each once",
    "nn.forward_hooks.before_next_forward": "one function, as an object",
    "world.apart._hooks": "the same, which gives way to one that is called later",
    "comm.base_group._groups": "groups that a fork renews in the child",
    "comm.shm.memory._shared_at": "by address, which memory other processes reach",
    "comm.shm.memory._Room": "memory that may be taken: a look at its limits takes long",
    "comm.shm.one_copy._copies": "mappings whose pages are taken before a fork",
    "comm.shm.one_copy._watch_forks": "so that a fork takes them once",
    "grad.memory._memories": "gradients that are the parent's alone after a fork",
    "grad.memory._fork": "what a thread that forks has yet to tell its child",
    "checkpoint.saving._backgrounds": "saves that the exit of the process waits for",
    "comm.network._addresses": "where Gloo listens, which no function of torch's takes",
    "comm.network._told_apart": "what tells this host from copies of it",
    "world.rendezvous._held_open": "stores at ports, which can be opened once",
    "world.rendezvous._open_files": "files of stores, open as long as the process",
    "comm.threads.ranks.changed": "wakes threads that wait for each other",
    "comm.threads.ranks._turn_is_over": "the same, for the turn of one rank at a time",
    "comm.threads.ranks._isolation": "torch's record of groups, while ranks are threads",
    "comm.threads.transport._states": "where threads meet that are to be a group, by its name",
    # Where a higher layer tells a lower one what to call.
    "world.apart.keepers": "what keeps parameters in step, asked for by optimizer",
    "world.world.when_joined": "what a trace does when its rank gets to know its number",
    "spans.recorder": "the trace, which sees all ranks of this process",
    "spans.status": "what the display of a run reads of this process",
    "observe.tracing._process": "all traces of this process, which share its hooks",
    "observe.logger._logger": "where log() writes, which takes no argument",
    "world.world.World": "a trial of `lockstep check` has the program see another world_size",
    # By context, which Python keeps; and torch's own.
    "torch_private._execution_engine": "torch's engine of autograd",
    "nn.autograd._task": "the backward whose hook runs",
    "nn.replicas.group._replica": "the replica that runs",
    "nn.shard._turn": "the shard whose loop body a thread runs, which mean() finds",
    "nn.shard._turn_of_process": "the same for threads of autograd, which a device's backward has",
    "same_bits.turns.exclusive": "who uses the global generators, which a process has once",
    # What is said once.
    "nn.parallel_state._has_warned": "losses that are divided though their mean is taken",
    "world.told._tell_of_strangers": "ranks that have not met",
    # Results that are the same each time.
    "comm.collectives._reduction": "how a reduction is computed",
    "comm.transport.encoded": "a signature in bytes",
    "data.partition.cuts": "where parts begin",
    "launcher.failures._torch_folder": "where torch is",
    "nn.replicas.worker_threads._pause": "a function of torch's OpenMP",
    "nn.sync_batch_norm._synchronised": "classes, of which there is one for each of torch's",
    "world.devices._has_float64": "what a device can",
}

# They can't be imported: it runs the command, or their trainers needn't be installed.
_NOT_IMPORTED = {
    "lockstep.__main__",
    "lockstep.integrations.fabric",
    "lockstep.integrations.lightning",
}


def test_modules_keep_no_state_but_what_is_listed() -> None:
    found = set[str]().union(*(state_of(m, _tree_of(m)) for m in MODULES if m not in _NOT_IMPORTED))
    assert found - MODULE_STATE.keys() == set(), "let an object own it, or list it with a reason"
    assert MODULE_STATE.keys() - found == set(), "take them off MODULE_STATE"


@pytest.mark.parametrize("module", MODULES)
def test_what_is_named_in_capitals_is_not_changed(module: str) -> None:
    assert changed_constants(_tree_of(module)) == []


def _tree_of(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())
