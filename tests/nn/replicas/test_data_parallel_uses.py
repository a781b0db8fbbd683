"""``DataParallel``: what it is given, where it is put, how it is kept, and how it fails."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import threading
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
from torch import nn

from lockstep.nn import DataParallel, data_parallel
from tests.nn.replicas.nets import THREE, TWO, batch, replicable
from tests.same import assert_same, assert_same_gradients, gradients_of
from tests.waiting import until


class TestNestings:
    """Inputs and outputs of all kinds."""

    @dataclass
    class Pair:
        left: torch.Tensor
        right: list[torch.Tensor]

    def test_nested_inputs_and_outputs(self) -> None:
        pair = TestNestings.Pair

        class Nested(nn.Module):
            def forward(self, both, *, more):
                return {
                    "pair": pair(both.left * 2, [both.right[0] + more["x"]]),
                    "loss": both.left.sum(),
                    "name": "nested",
                    "rows": len(both.left),
                    "none": None,
                }

        x = batch().requires_grad_()
        output = DataParallel(Nested(), TWO)(pair(x, [x]), more={"x": x})
        assert isinstance(output["pair"], pair)
        assert torch.equal(output["pair"].left, x * 2)
        assert torch.equal(output["pair"].right[0], x + x)
        assert output["loss"].shape == (2,)  # a vector, of one for each replica
        assert (output["name"], output["rows"], output["none"]) == ("nested", [4, 3], None)
        output["loss"].sum().backward()
        assert torch.equal(x.grad, torch.ones_like(x))

    def test_gradients_come_through_attributes_of_objects(self) -> None:
        class Gaussian(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 1).double()

            def forward(self, x: torch.Tensor) -> torch.distributions.Normal:
                return torch.distributions.Normal(self.layer(x), 1.0)

        module, expected = Gaussian(), Gaussian()
        expected.load_state_dict(module.state_dict())
        sum(normal.loc.sum() for normal in DataParallel(module, TWO)(batch())).backward()
        expected(batch()).loc.sum().backward()
        assert_same_gradients(module, expected)

    def test_outputs_may_be_inputs_and_parameters(self) -> None:
        class Returns(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.ones(1, 4))

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
                return x, self.weight, (x > 0).sum(1)

        module, x = Returns(), torch.ones(4, 4, requires_grad=True)
        same, weight, counts = DataParallel(module, TWO)(x)
        assert not counts.requires_grad
        (same.sum() + weight.sum()).backward()
        assert x.grad.eq(1).all()
        assert module.weight.grad.eq(2).all()

    def test_inputs_may_be_modified_in_place(self) -> None:
        module = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2).double())
        expected = copy.deepcopy(module)
        x, y = batch().requires_grad_(), batch().requires_grad_()
        DataParallel(module, THREE)(x * 1).sum().backward()
        expected(y * 1).sum().backward()
        assert_same([x.grad, *gradients_of(module)], [y.grad, *gradients_of(expected)])
        data_parallel(module, x * 1, THREE).sum().backward()
        expected(y * 1).sum().backward()
        assert_same([x.grad, *gradients_of(module)], [y.grad, *gradients_of(expected)])
        DataParallel(module, THREE)(batch()).sum().backward()  # and where they need no gradient

    def test_without_tensors_all_replicas_run(self) -> None:
        class Counts(nn.Module):
            def forward(self, count: int) -> torch.Tensor:
                return torch.full((count,), 1.0)

        assert len(DataParallel(Counts(), TWO)(3)) == 6

    def test_without_arguments_one_replica_runs(self) -> None:
        class Nothing(nn.Module):
            def forward(self) -> str:
                return "here"

        assert DataParallel(Nothing(), TWO)() == "here"


class TestPlaces:
    """It may be a part of a model, or have one inside."""

    def test_a_middle_block(self) -> None:
        expected = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
        expected = expected.append(nn.Linear(4, 1)).double()
        model = copy.deepcopy(expected)
        model[1] = DataParallel(model[1], TWO)
        model(batch()).sum().backward()
        expected(batch()).sum().backward()
        assert_same_gradients(model, expected)
        assert list(model.state_dict()) == list(expected.state_dict())
        model.load_state_dict(expected.state_dict())

    def test_one_inside_of_another(self) -> None:
        module, expected = (nn.Sequential(replicable(), nn.Tanh()) for _ in range(2))
        module[0] = DataParallel(module[0], TWO)
        model = DataParallel(module, TWO)
        for _ in range(2):
            model(batch()).sum().backward()
            expected(batch()).sum().backward()
            assert_same_gradients(module, expected)

    def test_calls_from_several_threads(self) -> None:
        module, expected = replicable(), replicable()
        model, errors = DataParallel(module, TWO), []

        def run(rows: int) -> None:
            try:
                for _ in range(5):
                    found = torch.autograd.grad(model(batch(rows)).sum(), list(module.parameters()))
                    wanted = torch.autograd.grad(
                        expected(batch(rows)).sum(), list(expected.parameters())
                    )
                    assert_same(found, wanted)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rows,)) for rows in (3, 8, 13)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


class TestState:
    """State dicts, copies and pickles are those of the module."""

    def test_state_dicts_of_either_kind_are_loaded(self) -> None:
        model, other = DataParallel(replicable(), TWO), replicable()
        assert list(model.state_dict()) == list(other.state_dict())
        for prefix in ("", "module."):
            state = {prefix + name: value + 1 for name, value in other.state_dict().items()}
            model.load_state_dict(state)
            assert torch.equal(model.module.first.bias, other.first.bias + 1)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})

    @pytest.mark.parametrize(
        "copied",
        [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
        ids=["copy", "pickle"],
    )
    def test_copies_are_other_models(self, copied) -> None:
        model = DataParallel(replicable(), TWO)
        model(batch())
        other = copied(model)
        other(batch()).sum().backward()
        assert gradients_of(model.module) == [None] * 4
        assert all(g is not None for g in gradients_of(other.module))

    def test_its_threads_end_with_it(self) -> None:
        before = set(threading.enumerate())
        model = DataParallel(replicable(), TWO)
        model(batch())
        more = set(threading.enumerate()) - before
        assert len(more) == 1  # the first runs in the caller's
        del model
        gc.collect()
        for thread in more:
            thread.join(20)
            assert not thread.is_alive()

    def test_a_forked_process_has_threads_of_its_own(self) -> None:
        model = DataParallel(replicable(), TWO)
        expected = model(batch())
        if not (pid := os.fork()):
            code = 1
            try:
                with torch.no_grad():
                    code = 0 if torch.equal(model(batch()), expected) else 2
            finally:
                os._exit(code)
        ended: list[int] = []

        def has_ended() -> bool:
            found, status = os.waitpid(pid, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if found else [])
            return bool(ended)

        if not until(has_ended, 20):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        assert ended == [0]


class TestFailures:
    """Who failed is named, in the error that it raised."""

    def test_a_failed_replica_is_named(self) -> None:
        class Fails(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise ArithmeticError(f"{len(x)} rows")

        with pytest.raises(ArithmeticError, match="4 rows") as caught:
            DataParallel(Fails(), TWO)(batch())
        first, second = caught.value.__notes__
        assert first == "(raised in replica 0 on cpu)"
        assert "3 rows" in second

    def test_a_lazy_module_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no shape yet"):
            DataParallel(nn.LazyLinear(2), TWO)(torch.ones(2, 2))

    def test_bad_options_are_refused(self) -> None:
        with pytest.raises(ValueError, match="workers is 'greenlets', but replicas run in threads"):
            DataParallel(replicable(), TWO, workers="greenlets")
        with pytest.raises(ValueError, match="device_ids is empty"):
            DataParallel(replicable(), [])

    def test_replicas_in_processes_name_what_is_there_instead(self) -> None:
        with pytest.raises(ValueError) as caught:
            DataParallel(replicable(), TWO, workers="processes")
        told = str(caught.value)
        assert "model = lockstep.parallelize(Net(...).to(world.device))" in told
        assert "lockstep.launch(train, nprocs=2)" in told
        with pytest.raises(TypeError, match="unexpected keyword argument 'timeout'"):
            DataParallel(replicable(), TWO, timeout=timedelta(minutes=1))
        assert_same(
            [DataParallel(replicable(), TWO, workers="threads")(batch())], [replicable()(batch())]
        )


class TestDevices:
    """By default all there are."""

    def test_by_default_one_for_each_intra_op_thread(self) -> None:
        before = torch.get_num_threads()
        try:
            for mine, count in ((1, 1), (2, 2), (16, 4)):
                torch.set_num_threads(mine)
                assert DataParallel(replicable()).device_ids == [torch.device("cpu")] * count
        finally:
            torch.set_num_threads(before)

    def test_indices_are_ignored_without_accelerators(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
        model = DataParallel(replicable(), [0, 1, 2, 3], output_device=0)
        assert torch.equal(model(batch()), DataParallel(replicable())(batch()))

    def test_a_single_device_has_no_threads(self) -> None:
        before = threading.active_count()
        assert torch.equal(DataParallel(replicable(), ["cpu"])(batch()), replicable()(batch()))
        assert threading.active_count() == before
