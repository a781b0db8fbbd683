"""Loops over steps(): loaders of all kinds, what is left and taken up again, and bad input."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader as TorchsDataLoader
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import CheckpointMismatch, SaveFailed
from tests.ranks import run_ranks
from tests.waiting import until

DATA = TensorDataset(torch.arange(20.0)[:, None])


def loader_of(batch_size: int = 5) -> Any:
    return lockstep.DataLoader(DATA, batch_size, shuffle=True, seed=1)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


class Stateful:
    """A loader as others make them: its state has a tensor, and it draws from torch's generator."""

    def __init__(self, length: int, rank: int = 0, *, has_length: bool = True) -> None:
        self.length, self.at, self.rank, self.is_epoch_over = length, 0, rank, False
        if has_length:
            self.__class__ = StatefulWithLength

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at = 0 if self.is_epoch_over else self.at
        self.is_epoch_over = False
        while self.at < self.length:
            self.at += 1
            yield torch.rand(()) + self.rank
        self.is_epoch_over = True

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at), "rank": self.rank, "over": self.is_epoch_over}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.rank
        self.at, self.is_epoch_over = int(state["at"]), state["over"]


class StatefulWithLength(Stateful):
    def __len__(self) -> int:
        return self.length


def test_a_loop_that_is_left_goes_on_where_it_was() -> None:
    whole = [x.tolist() for (x,) in lockstep.steps(loader_of(), epochs=3)]
    steps = lockstep.steps(loader_of(), epochs=3)
    found, epochs = [], []
    for epoch in range(3):
        for (x,) in steps:
            found.append(x.tolist())
            epochs.append((epoch, steps.epoch))
            if steps.is_last_of_epoch:
                break
    assert found == whole
    assert epochs == [(e, e) for e in range(3) for _ in range(4)]
    assert steps.step == 11


@pytest.mark.parametrize("loader", [loader_of, lambda: Stateful(4, has_length=False)])
def test_a_loop_over_epochs_commits_all_steps_and_what_follows_each_epoch(
    tmp_path: Path, loader: Any
) -> None:
    def run(epochs: range, total: torch.Tensor) -> list[tuple[int, int, int]]:
        steps = lockstep.steps(loader(), tmp_path, epochs=len(epochs), total=total)
        found = []
        for epoch in epochs[steps.epoch :]:
            for _ in steps.rest_of_epoch():
                total += 1
                found.append((epoch, steps.epoch, steps.step))
            total += 10
            assert steps.best(-float(total))
        return found

    assert run(range(3), torch.zeros(())) == [(e, e, 4 * e + i) for e in range(3) for i in range(4)]
    assert names_in(tmp_path) == ["000001", "best"]
    lockstep.load(tmp_path, total=(total := torch.zeros(())))
    assert total == 32  # without what follows the last step
    lockstep.load(tmp_path / "best", total=total)
    assert total == 42


def test_a_step_within_an_epochs_loop_may_end_the_run_or_fail(tmp_path: Path) -> None:
    total = torch.zeros(())
    steps = lockstep.steps(loader_of(), tmp_path, num_steps=6, total=total)
    for _ in range(2):
        for _ in steps.rest_of_epoch():
            total += 1
    lockstep.load(tmp_path, total=(saved := torch.zeros(())))
    assert saved == 6

    steps = lockstep.steps(loader_of(), tmp_path / "fails", epochs=1, total=total)

    def fail_in_the_last_step() -> None:
        for _ in steps.rest_of_epoch():
            assert not steps.is_last_of_epoch

    with pytest.raises(AssertionError):
        fail_in_the_last_step()
    assert names_in(tmp_path / "fails") == []


@pytest.mark.parametrize("last", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_last_step_that_break_leaves_is_told_at_exit(tmp_path: Path, last: int) -> None:
    program = (
        "import lockstep\n"
        f"for number in lockstep.steps(4, {str(tmp_path)!r}):\n"
        f"    if number == {last}: break\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0
    assert ("Step 3, the last one of its run, isn't in any checkpoint" in done.stderr) == (
        last == 3
    )


def test_a_signal_in_a_step_that_is_left_by_break_stops_the_run(tmp_path: Path) -> None:
    steps = lockstep.steps(5, tmp_path)
    for number in steps:
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
            break
    with pytest.raises(SystemExit, match="75"):
        next(iter(steps))
    assert names_in(tmp_path) == ["000001"]


def test_a_second_loop_over_all_epochs_has_none_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = lockstep.steps(3)
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert [[*steps] for _ in range(2)] == [[0, 1, 2], []]
    assert "All of the 3 steps of steps() are done" in caplog.text


def test_a_loop_within_a_loop_is_refused() -> None:
    outer, inner = lockstep.steps(3), lockstep.steps(3)
    for number in outer:
        if number == 1:
            with pytest.raises(RuntimeError, match=r"over other steps\(\) runs already, in step 1"):
                next(iter(inner))
            with pytest.raises(RuntimeError, match=r"over these steps\(\) runs already, in step 1"):
                next(iter(outer))
    assert [*inner] == [0, 1, 2]


def test_a_run_that_is_over_says_that_nothing_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.zeros(())
    for _ in lockstep.steps(4, tmp_path, weight=weight):
        weight += 1
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert [*lockstep.steps(4, tmp_path, weight=weight)] == []
        assert "All of the 4 steps of this run were done before" in caplog.text
    assert [*lockstep.steps(6, tmp_path, weight=weight)] == [4, 5]
    assert weight == 4


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("end", range(1, 10))
def test_another_loader_goes_on_too(tmp_path: Path, end: int, has_length: bool) -> None:
    def run(path: Path, end: int) -> list[Any]:
        steps = lockstep.steps(
            Stateful(4, has_length=has_length), path, epochs=3, save_every=1, seed=3
        )
        found: list[Any] = []
        for x in steps:
            last = steps.is_last_of_epoch
            found.append([steps.step, steps.epoch, last, float(x), float(torch.rand(()))])
            if steps.step == end:
                break
        return found

    expected = run(tmp_path / "whole", 99)
    assert [each[2] for each in expected] == [False, False, False, True] * 3
    first = run(tmp_path / "run", end)
    torch.rand(3)
    assert first[:-1] + run(tmp_path / "run", 99) == expected


class PerRank:
    """Something of which each rank has another state."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "tensor": torch.tensor([self.number])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["tensor"] == state["number"]
        self.number = state["number"]


def test_states_that_differ_between_ranks_are_each_ranks_own(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup, *, end: int = 99) -> Any:
        loader, thing, same = Stateful(5, rank), PerRank(rank), PerRank(7)
        steps = lockstep.steps(
            *(loader, tmp_path), epochs=1, save_every=1, process_group=group, thing=thing, same=same
        )
        for _ in steps:
            if steps.step == end:
                break
            thing.number += 10
        lockstep.load(tmp_path, process_group=group)  # waits for the last save
        return steps.step, thing.number, same.number

    assert run_ranks(2, lambda rank, group: body(rank, group, end=3)) == [(3, 30, 7), (3, 31, 7)]
    assert run_ranks(2, body) == [(4, 50, 7), (4, 51, 7)]
    with pytest.raises(ValueError, match="another state on each of 2 ranks, and there are 3 now"):
        run_ranks(3, body)


def test_a_state_that_differs_between_ranks_is_rank_0s_on_other_numbers(tmp_path: Path) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> int:
        thing = PerRank(rank + 3)
        for _ in lockstep.steps(group.size(), tmp_path, process_group=group, thing=thing):
            thing.number += 10
        return thing.number

    assert run_ranks(2, body) == [23, 24]
    assert run_ranks(3, body) == [33, 33, 33]


def test_checkpoints_of_another_program_stay_and_are_an_error(tmp_path: Path) -> None:
    def model(width: int) -> nn.Module:
        return nn.Linear(width, 1)

    def files() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    assert len([*lockstep.steps(2, tmp_path, model=model(3))]) == 2
    before = files()
    for options, error, match in (
        ({"model": model(4)}, CheckpointMismatch, "has shape"),
        ({"net": model(3)}, CheckpointMismatch, "There is no 'net'"),
        ({"model": torch.zeros(3)}, CheckpointMismatch, "was saved as a module"),
    ):
        with pytest.raises(error, match=match) as caught:
            lockstep.steps(2, tmp_path, **options)
        assert "Give each run a path of its own" in "".join(caught.value.__notes__)
    with pytest.raises(ValueError, match="came from a number of steps, and this loader is a Data"):
        lockstep.steps(loader_of(), tmp_path, epochs=1, model=model(3))
    with pytest.raises(ValueError, match="came from a number of steps, and this loader is a Stat"):
        lockstep.steps(Stateful(3), tmp_path, epochs=1, model=model(3))
    assert files() == before


def test_another_loader_than_that_of_the_run_is_an_error(tmp_path: Path) -> None:
    for (_,) in lockstep.steps(loader_of(), tmp_path, epochs=1, save_every=1):
        break
    steps = lockstep.steps(loader_of(), tmp_path, num_steps=3)
    assert len([*steps]) == 3
    with pytest.raises(ValueError, match="batch_size was 5, and this one's is 4"):
        lockstep.steps(loader_of(4), tmp_path, epochs=2)
    with pytest.raises(ValueError, match="came from a DataLoader, and this loader is a Stateful"):
        lockstep.steps(Stateful(3), tmp_path, epochs=2)
    with pytest.raises(
        ValueError, match=r"came from a DataLoader, and steps\(\) is given a number"
    ):
        lockstep.steps(9, tmp_path)


def test_a_folder_that_cannot_be_made_is_known_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="a file"):
        lockstep.steps(3, tmp_path / "file")
    with pytest.raises(SaveFailed, match=r"can't be made \(Not a directory\)"):
        lockstep.steps(3, tmp_path / "file" / "run")


@pytest.mark.parametrize("whole", [True, False])
def test_a_body_that_iterates_over_the_loader_is_an_error(tmp_path: Path, whole: bool) -> None:
    loader = loader_of()

    def iterate() -> None:
        for number, _ in enumerate(lockstep.steps(loader, tmp_path, epochs=2, save_every=1)):
            if number == 1:
                iterator = iter(loader)
                assert len([*iterator] if whole else [next(iterator)]) == (4 if whole else 1)

    with pytest.raises(RuntimeError, match=r"steps\(\) has given 2 batches of epoch 0: the body"):
        iterate()
    until(lambda: names_in(tmp_path) == ["000001"])  # of the step before


def test_what_cannot_go_on_is_refused_with_what_can() -> None:
    for loader, name in ((TorchsDataLoader(DATA), "DataLoader"), ([1, 2], "list")):
        with pytest.raises(TypeError, match=f"go on with a {name} .* Use lockstep.DataLoader"):
            lockstep.steps(loader, epochs=1)
    for thing in (0.5, {"a": torch.zeros(1)}, object()):
        with pytest.raises(TypeError, match=r"'thing' is an? \w+, into which steps"):
            lockstep.steps(3, thing=thing)
    with pytest.raises(ValueError, match="either epochs or num_steps"):
        lockstep.steps(loader_of())
    with pytest.raises(ValueError, match="save_every"):
        lockstep.steps(loader_of(), epochs=1, save_every=0)


def test_checkpoints_come_by_time_too_and_the_last_ones_and_the_best_are_kept(
    tmp_path: Path,
) -> None:
    weight = torch.zeros(())
    steps = lockstep.steps(6, tmp_path, save_every=timedelta(0), keep=3, weight=weight)
    for number in steps:
        weight += 1
        assert steps.best((3, 1, 2, 0.5, 5, 6)[number]) == (number in (0, 1, 3))
    assert names_in(tmp_path) == ["000004", "000005", "000006", "best"]
    lockstep.load(tmp_path / "best", weight=weight)
    assert weight == 4


def test_parameters_that_are_not_finite_replace_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 1)
    model.bias.requires_grad_(False).fill_(float("-inf"))  # a mask, which isn't trained
    steps = lockstep.steps(6, tmp_path, save_every=1, keep=2, model=model)
    for number in steps:
        with torch.no_grad():
            model.weight[0, 1] = float("nan") if number >= 3 else number
        steps.best(0.5 - number)
    assert names_in(tmp_path) == ["000002", "000003", "best"]
    assert "trained parameters aren't finite, model.weight first" in caplog.text
    for folder in (tmp_path, tmp_path / "best"):
        lockstep.load(folder, model=model)
        assert model.weight[0, 1] == 2
    assert next(iter(lockstep.steps(6, tmp_path, model=model))) == 3, "it goes on from there"


def test_modes_and_frozen_parameters_come_back_unless_the_program_was_edited(
    tmp_path: Path,
) -> None:
    def model() -> nn.Sequential:
        found = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        found[0].weight.requires_grad_(False)
        return found

    first = model()
    for number in lockstep.steps(2, tmp_path, model=first):
        if number == 0:
            first[0].weight.requires_grad_(True)
            first[1].eval()
    second = model()
    lockstep.steps(3, tmp_path, model=second)
    assert second[0].weight.requires_grad
    assert second[0].training
    assert not second[1].training
    edited = model()
    edited[0].bias.requires_grad_(False)
    lockstep.steps(3, tmp_path, model=edited)
    assert not edited[0].weight.requires_grad
    assert edited[1].training


def test_the_loader_of_lockstep_gives_its_usual_batches() -> None:
    loader = loader_of()
    expected = [x.tolist() for _ in range(2) for (x,) in loader]
    torch.manual_seed(8)
    loader = lockstep.DataLoader(DATA, 5, shuffle=True)
    usual = [x.tolist() for (x,) in loader]
    assert [x.tolist() for (x,) in lockstep.steps(loader_of(), num_steps=8)] == expected
    torch.manual_seed(8)
    loader = lockstep.DataLoader(DATA, 5, shuffle=True)
    assert [x.tolist() for (x,) in lockstep.steps(loader, epochs=1)] == usual


def test_to_ask_for_the_end_of_an_epoch_draws_no_numbers_of_the_step() -> None:
    def run(*, asks: bool) -> list[float]:
        steps = lockstep.steps(Stateful(4, has_length=False), epochs=2, seed=3)
        return [
            float(torch.rand(())) for _ in steps if not asks or steps.is_last_of_epoch in (0, 1)
        ]

    assert run(asks=True) == run(asks=False)


class WithExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.expert = (nn.Linear(3, 3, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.second(x)) + self.expert(x)


@pytest.mark.long
def test_a_run_goes_on_whose_model_has_a_part_that_is_parallel_over_some_ranks(
    tmp_path: Path,
) -> None:
    """Ranks 0 and 1 share an expert, and rank 2 has one of its own."""

    def body(world: lockstep.World, path: Path, num_steps: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = WithExpert()
        groups = [dist.new_group([0, 1]), dist.new_group([2])]
        lockstep.parallelize(model.expert, process_group=groups[world.rank // 2])
        lockstep.parallelize(model)
        data = TensorDataset(torch.randn(90, 3))
        steps = lockstep.steps(
            lockstep.DataLoader(data, 3), path, num_steps=7, save_every=2, model=model
        )
        found = []
        for (x,) in steps:
            model.zero_grad()
            model(x).square().sum().backward()
            found += [p.grad.clone() for p in (model.first.weight, model.second.weight)]
            if steps.step + 1 == num_steps:
                break
        return found

    whole = lockstep.launch(body, 3, args=(tmp_path / "whole", 7))
    lockstep.launch(body, 3, args=(tmp_path / "parts", 4))
    rest = lockstep.launch(body, 3, args=(tmp_path / "parts", 7))
    for expected, found in zip(whole, rest, strict=True):
        assert len(found) >= 6
        assert all(map(torch.equal, found, expected[-len(found) :]))


def test_a_signal_in_the_last_step_stops_behind_it(tmp_path: Path) -> None:
    weight = torch.zeros(1)

    def add_three() -> None:
        for step in lockstep.steps(3, tmp_path, weight=weight):
            weight.add_(1)
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit, match="75"):
        add_three()
    again = lockstep.steps(3, tmp_path, weight=weight.zero_())
    assert [*again] == []
    assert weight.item() == 3
