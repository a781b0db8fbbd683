"""Which names are public."""

from __future__ import annotations

import importlib
import re

import pytest

import lockstep
from tests.source import (
    TESTS,
)

PUBLIC_MODULES = [
    "lockstep.checkpoint",
    "lockstep.comm",
    "lockstep.data",
    "lockstep.errors",
    "lockstep.grad",
    "lockstep.integrations",
    "lockstep.launcher",
    "lockstep.nn",
    "lockstep.observe",
    "lockstep.resume",
    "lockstep.train",
    "lockstep.world",
]


# Whoever adds a public name adds it here, and so means it.
PUBLIC_NAMES = {
    "Blame",
    "DataLoader",
    "DataParallel",
    "DataPartitioner",
    "DistributedDataParallel",
    "DistributedSampler",
    "LockstepError",
    "Partition",
    "ReplicaDifference",
    "World",
    "ZeroRedundancyOptimizer",
    "accumulate",
    "all_gather",
    "any",
    "average_gradients",
    "broadcast",
    "clip_grad_norm_",
    "data_parallel",
    "check_replicas",
    "checkpoint",
    "errors",
    "explain",
    "gather",
    "guard",
    "init",
    "join",
    "launch",
    "load",
    "log",
    "log_to",
    "SyncBatchNorm",
    "mean",
    "no_sync",
    "parallel_apply",
    "parallelize",
    "partition",
    "reduce",
    "replicate",
    "save",
    "scatter",
    "scatter_kwargs",
    "seed",
    "shard_optimizer",
    "shards",
    "steps",
    "sync_buffers",
    "trace",
}


def test_public_names_are_those_and_exist() -> None:
    assert set(lockstep.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(lockstep, name).__doc__


def test_types_of_all_public_names_are_checked() -> None:
    """mypy checks them in ``make check``; here it is only whether none is left out."""
    used = set(re.findall(r"lockstep\.(\w+)", (TESTS / "public_types.py").read_text()))
    assert not PUBLIC_NAMES - used, "use them in tests/public_types.py"


@pytest.mark.parametrize("module_name", PUBLIC_MODULES)
def test_all_is_what_is_public(module_name: str) -> None:
    module = importlib.import_module(module_name)
    for name in module.__all__:
        assert getattr(module, name).__doc__, f"{name} needs a docstring"
    public = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("lockstep")
    }
    assert public <= set(module.__all__)


def test_every_error_is_in_the_tree_and_its_drawing() -> None:
    errors = lockstep.errors
    defined = {name for name in vars(errors) if not name.startswith("_") and name != "annotations"}
    assert defined == set(errors.__all__)
    for name in defined:
        assert issubclass(getattr(errors, name), errors.LockstepError)
        assert name in errors.__doc__
