"""What is said to other libraries, as far as it needs none of them. The rest: tests/clients."""

from __future__ import annotations

import sys

import pytest
import torch

import lockstep
from lockstep.integrations import replace_torch_ddp


def test_torchs_wrapper_is_ours_for_a_while() -> None:
    def fail_in_between() -> None:
        with replace_torch_ddp():
            assert torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
            with replace_torch_ddp():
                models.append(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2)))
            assert torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
            raise KeyError

    theirs, models = torch.nn.parallel.DistributedDataParallel, []
    with pytest.raises(KeyError):
        fail_in_between()
    assert torch.nn.parallel.DistributedDataParallel is theirs
    assert isinstance(models[0], theirs)


def test_no_library_is_imported_unasked() -> None:
    assert not {"lightning", "accelerate", "transformers", "ray"} & {*sys.modules}
