"""A compiled model in our wrapper, and our wrapper compiled. (Steps: test_compiled_steps.)"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ParameterChanged
from tests.counts import in_turn
from tests.nn.parallel import net, parts

OurDDP = lockstep.DistributedDataParallel


def compiled_first(model: nn.Module, backend: str) -> nn.Module:
    return OurDDP(torch.compile(model, backend=backend))


def compiled_last(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(OurDDP(model), backend=backend)


def compiled_to_be_fast(model: nn.Module, backend: str) -> nn.Module:
    return torch.compile(OurDDP(model), backend=backend, mode="reduce-overhead")


def compiled_in_place(model: nn.Module, backend: str) -> nn.Module:
    wrapper = OurDDP(model)
    wrapper.compile(backend=backend)
    return wrapper


def compiled_inside(model: nn.Module, backend: str) -> nn.Module:
    wrapper = OurDDP(model)
    wrapper.module.compile(backend=backend)
    return wrapper


@in_turn(
    "compiled, backend",
    [compiled_first, compiled_last, compiled_in_place, compiled_inside],
    ["aot_eager", "eager"],
)
def test_a_compiled_model(compiled: Callable[..., nn.Module], backend: str) -> None:
    check_compiled(compiled, backend)


def test_a_step_before_has_no_hook_of_which_compiled_modules_warn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._dynamo.eval_frame, "cached_backends", {})  # nothing has compiled

    def body(_: lockstep.World) -> None:
        model = lockstep.parallelize(nn.Linear(3, 2))
        model(torch.ones(2, 3)).sum().backward()
        torch.compile(nn.Linear(3, 2), backend="eager")(torch.ones(2, 3))

    lockstep.launch(body, 2, ranks="threads")


def test_what_is_put_in_place_of_all_parameters_of_compiled_code_is_named() -> None:
    def body(_: lockstep.World) -> None:
        model = lockstep.parallelize(nn.Sequential(nn.Linear(3, 2)))
        compiled = torch.compile(model, backend="eager")
        for _ in range(2):
            compiled(torch.ones(2, 3)).sum().backward()
        for name, parameter in model[0]._parameters.items():
            model[0]._parameters[name] = nn.Parameter(2 * parameter.detach())
        with pytest.raises(ParameterChanged, match=r"'0\.weight' was put in its place"):
            compiled(torch.ones(2, 3)).sum().backward()

    lockstep.launch(body, 2, ranks="threads")


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile with inductor needs a C++ compiler (g++)"
)
def test_a_model_compiled_to_machine_code(tmp_path: Path) -> None:
    # In a process of its own, as it leaves threads and variables behind.
    text = f"from {__name__} import *; check_compiled(compiled_to_be_fast, 'inductor')"
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", text],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr


def check_compiled(compiled: Callable[..., nn.Module], backend: str) -> None:
    def body(world: lockstep.World) -> list[torch.Tensor]:
        model = compiled(net(), backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(parts(2)[world.rank]).square().mean().backward()
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        alone(parts(2).flatten(0, 1)).square().mean().backward()
        optimizer.step()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        results = lockstep.launch(body, 2, ranks="threads")
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    finally:
        torch._dynamo.reset()
    for parameters in results:
        expected = [p.detach() for p in alone.parameters()]
        torch.testing.assert_close(parameters, expected, rtol=1e-12, atol=1e-12)
