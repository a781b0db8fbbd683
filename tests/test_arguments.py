"""A wrong argument of a public function: the error names it, what it was and what is wanted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _MixedPrecision

import lockstep
from lockstep.data import batch_share, batch_slice, epoch_shares
from lockstep.errors import SplitError

SEVERAL = torch.ones(2)
NAN = math.nan
DATA = range(10)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def wrapped(**options: Any) -> lockstep.DistributedDataParallel:
    return lockstep.DistributedDataParallel(**{"module": normed(), **options})


def loop(**options: Any) -> object:
    return lockstep.join(lockstep.parallelize(normed()), **options)


def norm(**options: Any) -> nn.Module:
    return lockstep.SyncBatchNorm(**{"num_features": 3, **options})


def average(**options: Any) -> None:
    lockstep.average_gradients(**{"module": normed(), **options})


def mean(weight: Any) -> torch.Tensor:
    return lockstep.mean(torch.ones(4), weight=weight)


def set_to(name: str) -> Callable[..., None]:
    return lambda **value: setattr(wrapped(), name, value[name])


def call_wrapper(method: str) -> Callable[..., object]:
    return lambda **options: getattr(wrapped(), method)(*options.pop("args", ()), **options)


def buffer_hook(hook: Any) -> None:
    wrapped()._register_buffer_comm_hook(None, hook)


def split(**options: Any) -> object:
    return lockstep.partition(**{"dataset": DATA, "sizes": [0.5, 0.5], **options})


def share(**options: Any) -> int:
    return batch_share(**{"batch_size": 8, "rank": 0, "world_size": 2, **options})


def shares(**options: Any) -> list[int]:
    return epoch_shares(**{"num_samples": 8, "batch_size": 4, "world_size": 2, **options})


class Wrong(NamedTuple):
    """A call with one wrong argument."""

    function: Callable[..., object]
    argument: str
    value: object
    error: type[Exception]
    says: str


MODULES = [
    Wrong(function, "module", value, TypeError, rf"^module is {shown}, not a torch\.nn\.Module")
    for function in (
        lockstep.parallelize,
        lockstep.DistributedDataParallel,
        lockstep.average_gradients,
        lockstep.no_sync,
        lambda module: lockstep.accumulate(module).__enter__(),
        lockstep.sync_buffers,
        lockstep.join,
        lockstep.SyncBatchNorm.convert_sync_batchnorm,
    )
    for value, shown in [
        (None, r"None \(NoneType\)"),
        (nn.Linear, r"<class '.*Linear'> \(type\)"),
        ([3], r"\[3\] \(list\)"),
    ]
]

FLAGS = [
    Wrong(function, argument, value, TypeError, rf"^{argument} is {shown}.*, not True or False")
    for function, argument in [
        (lambda init_sync: lockstep.parallelize(normed(), init_sync=init_sync), "init_sync"),
        (wrapped, "init_sync"),
        (wrapped, "skip_all_reduce_unused_params"),
        (loop, "divide_by_initial_world_size"),
        (loop, "throw_on_early_termination"),
        (call_wrapper("join"), "enable"),
        (set_to("require_backward_grad_sync"), "require_backward_grad_sync"),
        (norm, "affine"),
        (norm, "track_running_stats"),
    ]
    for value, shown in [("no", "'no'"), (SEVERAL, "tensor"), (NAN, "nan")]
]

POLICIES = [
    Wrong(function, argument, value, TypeError, f"{argument}.* is {shown}.*, not {wanted}")
    for function, argument in [
        (
            lambda broadcast_buffers: lockstep.parallelize(
                normed(), broadcast_buffers=broadcast_buffers
            ),
            "broadcast_buffers",
        ),
        (wrapped, "broadcast_buffers"),
        (wrapped, "forward_sync_buffers"),
        (set_to("broadcast_buffers"), "broadcast_buffers"),
    ]
    for value, shown, wanted in [
        ("mean", "'mean'", "True, False or a dict"),
        ({1: "mean"}, "1", "a str"),
    ]
]

GROUPS = [
    Wrong(function, "process_group", value, TypeError, says)
    for function in (
        norm,
        lambda process_group: lockstep.SyncBatchNorm.convert_sync_batchnorm(
            normed(), process_group
        ),
    )
    for value, says in [
        ("gloo", r"^process_group is 'gloo' \(str\), not a process group"),
        (dist.GroupMember.NON_GROUP_MEMBER, "^process_group is what new_group"),
    ]
]

OTHERS = [
    Wrong(lockstep.init, "backend", 3, TypeError, "^backend is 3 .*, not the name of a backend"),
    Wrong(lockstep.init, "device", [], TypeError, r"^device is \[\] \(list\), not a device"),
    Wrong(lockstep.init, "device", True, TypeError, r"^device is True \(bool\), not a device"),
    Wrong(lockstep.init, "device", "gpu", ValueError, "^device is 'gpu' .*, not a device"),
    Wrong(lockstep.init, "timeout", 60, TypeError, "^timeout is 60 .*, not a timedelta"),
    Wrong(wrapped, "device_ids", 0.5, TypeError, "^device_ids is 0.5 .*, not a list"),
    Wrong(wrapped, "device_ids", [None], TypeError, r"^device_ids\[0\] is None .*, not a device"),
    Wrong(wrapped, "device_ids", ["gpu"], ValueError, r"^device_ids\[0\] is 'gpu' .* device"),
    Wrong(wrapped, "device_mesh", 2, TypeError, "^device_mesh is 2 .*, not a DeviceMesh"),
    Wrong(wrapped, "mixed_precision", "fp16", TypeError, "^mixed_precision is 'fp16' .*, not an"),
    Wrong(
        wrapped,
        "mixed_precision",
        _MixedPrecision(reduce_dtype="fp16"),  # type: ignore[arg-type]
        TypeError,
        r"^mixed_precision\.reduce_dtype is 'fp16' .*, not a torch\.dtype",
    ),
    Wrong(wrapped, "device_ids", "cuda:0", TypeError, "^device_ids is 'cuda:0' .*, not a list"),
    Wrong(wrapped, "bucket_cap_mb_list", [1, "a"], ValueError, r"^bucket_cap_mb_list\[1\] is 'a'"),
    Wrong(wrapped, "bucket_cap_mb_list", [0, 1], ValueError, r"^bucket_cap_mb_list\[0\] is 0,"),
    Wrong(wrapped, "bucket_cap_mb_list", 25, TypeError, "^bucket_cap_mb_list is 25 .*, not a list"),
    Wrong(buffer_hook, "hook", "fp16", TypeError, "^hook is 'fp16' .*, not a function"),
    Wrong(
        call_wrapper("_register_builtin_comm_hook"),
        "comm_hook_type",
        "fp16",
        TypeError,
        "^comm_hook_type is 'fp16' .*, not a torch.distributed.BuiltinCommHookType",
    ),
    *(
        Wrong(average, "weight", value, error, f"^weight is {shown}.*, not a finite number of")
        for value, error, shown in [
            ("3", TypeError, "'3'"),
            (SEVERAL, TypeError, "tensor"),
            (NAN, ValueError, "nan"),
            (10**400, ValueError, "1000"),
        ]
    ),
    *(
        Wrong(mean, "weight", value, error, rf"^weight is {shown}.*, not a number or .* to \(4,\)")
        for value, error, shown in [
            ("3", TypeError, "'3'"),
            ([1, "a"], TypeError, r"\[1, 'a'\]"),
            (10**400, TypeError, "1000"),
            (torch.ones(3), ValueError, "tensor"),
        ]
    ),
    Wrong(
        norm, "num_features", 2.5, TypeError, "^num_features is 2.5 .*, not a number of channels"
    ),
    Wrong(norm, "num_features", -1, ValueError, "^num_features is -1 .*, not a number of channels"),
    Wrong(norm, "eps", "1e-5", TypeError, "^eps is '1e-5' .*, not a finite number, 0 or more"),
    Wrong(norm, "eps", NAN, ValueError, "^eps is nan .*, not a finite number, 0 or more"),
    Wrong(norm, "momentum", "0.1", TypeError, "^momentum is '0.1' .*, not a finite number"),
    Wrong(norm, "momentum", -math.inf, ValueError, "^momentum is -inf .*, not a finite number"),
    Wrong(norm, "device", "gpu", ValueError, "^device is 'gpu' .*, not a device"),
    Wrong(norm, "dtype", "float32", TypeError, r"^dtype is 'float32' .*, not a torch\.dtype"),
    Wrong(norm(), "input", [[1.0]], TypeError, r"^input is \[\[1\.0\]\] .*, not a tensor of shape"),
]

COUNTS = [
    Wrong(function, argument, value, TypeError, f"^{argument} is {shown}.*, not a whole number")
    for function, argument in [
        (split, "seed"),
        (lambda seed: lockstep.DataPartitioner(DATA, seed=seed), "seed"),
        (lambda part: lockstep.DataPartitioner(DATA).use(part), "part"),
        (lambda index: lockstep.Partition(DATA, [3, 4])[index], "index"),
        (share, "batch_size"),
        (share, "rank"),
        (share, "world_size"),
        (lambda rank: batch_slice(8, rank, 2), "rank"),
        (shares, "num_samples"),
        (shares, "batch_size"),
        (shares, "world_size"),
    ]
    for value, shown in [(NAN, "nan"), (1.5, "1.5"), ("1", "'1'"), (True, "True"), ([], r"\[\]")]
]

PARTS = [
    Wrong(shares, "num_samples", -1, SplitError, "^num_samples is -1 and world_size is 2"),
    Wrong(shares, "world_size", 0, SplitError, "^num_samples is 8 and world_size is 0"),
    Wrong(shares, "world_size", -1, SplitError, "^num_samples is 8 and world_size is -1"),
    Wrong(split, "dataset", {1, 2}, TypeError, "^set is not a dataset of known length"),
    Wrong(split, "dataset", torch.ones(()), TypeError, "^Tensor is not a dataset of known length"),
    Wrong(split, "sizes", torch.ones(()), TypeError, r"^sizes is tensor\(1.\), not one size for"),
    Wrong(
        lambda data: lockstep.Partition(data, [0]), "data", {1}, TypeError, "^data is {1}.* dataset"
    ),
    Wrong(
        lambda indices: lockstep.Partition(DATA, indices),
        "indices",
        3,
        TypeError,
        "^indices is 3 .*, not a sequence",
    ),
]

WITH_RANKS = [*MODULES, *FLAGS, *POLICIES, *GROUPS, *OTHERS]


def names(wrong: Wrong) -> str:
    name = getattr(wrong.function, "__name__", type(wrong.function).__name__)
    return f"{name}-{wrong.argument}-{type(wrong.value).__name__}"


def check_refused(wrong: Wrong) -> None:
    if wrong.function in (lockstep.join,) or isinstance(wrong.function, nn.Module):
        arguments, options = (wrong.value,), {}
    else:
        arguments, options = (), {wrong.argument: wrong.value}
    with pytest.raises(wrong.error, match=wrong.says):
        wrong.function(*arguments, **options)


@pytest.mark.parametrize("wrong", [*WITH_RANKS, *COUNTS, *PARTS], ids=names)
def test_a_wrong_argument_is_named(wrong: Wrong) -> None:
    check_refused(wrong)


@pytest.mark.parametrize("wrong", WITH_RANKS, ids=names)
def test_a_wrong_argument_is_named_on_every_rank_before_they_exchange_anything(
    wrong: Wrong,
) -> None:
    def body(world: lockstep.World) -> float:
        check_refused(wrong)
        # Whoever had begun to exchange something would find the ranks out of step here.
        return lockstep.mean(torch.arange(2.0) + world.rank).item()

    assert lockstep.launch(body, 2, ranks="threads", num_threads=1) == [1.0, 1.0]


def test_what_is_as_good_as_the_right_type_is_taken() -> None:
    assert share(batch_size=np.int64(8), rank=torch.tensor(1)) == 4
    seeds = (3, np.int64(3), torch.tensor(3))
    assert len({tuple(split(seed=seed)[0].indices) for seed in seeds}) == 1
    assert wrapped(broadcast_buffers=1, init_sync=np.True_).broadcast_buffers == 1
    assert norm(momentum=None, eps=np.float32(0.5)).eps == 0.5
    average(weight=torch.tensor(3))
    assert mean([1, 2, 3, 4]).item() == 1
