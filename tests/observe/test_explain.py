"""``explain()``: what it says is what happens, to the byte."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import lockstep
from lockstep.observe.trace_files import read_folder
from tests.ranks import run_ranks


class Net(nn.Module):
    """With all that can be kept in different ways."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, 8)
        self.rows = nn.Embedding(50, 8, sparse=True)
        self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)], nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 40, bias=False)
        self.head.weight = self.words.weight
        self.fixed = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.fixed(self.words(x) + self.rows(x))))  # type: ignore[no-any-return]


def step(model: nn.Module, x: torch.Tensor, optimizer: Any) -> None:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sent(folder: Path, world_size: int, last_step: int) -> list[dict[str, int]]:
    """What each rank gave to collectives in the last backward, by kind."""
    found = []
    for rank in read_folder(folder):
        [backward] = [s for s in rank.spans if s.name == "backward" and s.step == last_step]
        waits = [
            s
            for s in rank.spans
            if s.name == "wait" and backward.start <= s.start and s.stop <= backward.stop
        ]
        gradients = sum(s.num_bytes for s in waits if s.detail in ("all_reduce", "exchange"))
        buffers = sum(s.num_bytes for s in waits if s.detail == "broadcast")
        rows = sum(s.num_bytes for s in waits if s.detail == "all_gather")
        found.append({"gradients": gradients, "rows": rows, "buffers": buffers})
    assert len(found) == world_size
    return found


def rank_of_net(world: lockstep.World, folder: Path, shards: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = lockstep.parallelize(Net(), bucket_cap_mb=0.0005, process_group=world.process_group)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    if shards:
        optimizer = lockstep.shard_optimizer(optimizer)
    x = torch.arange(6) + world.rank
    before = lockstep.explain(model, x).to_dict()
    with lockstep.trace(folder):
        for _ in range(3):
            step(model, x, optimizer)
    return [before, lockstep.explain(model, x).to_dict()]


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_its_bytes_are_those_of_the_run(tmp_path: Path, world_size: int, shards: bool) -> None:
    by_rank = lockstep.launch(rank_of_net, world_size, (tmp_path, shards), ranks="threads")
    for last_step, index in ((0, 0), (2, 1)):
        for facts, local in zip(by_rank, sent(tmp_path, world_size, last_step), strict=True):
            told = facts[index]["bytes_per_step"]
            assert told["gradients"] == local["gradients"]
            assert told["buffers"] == local["buffers"]
            # Before the first step nobody knows how many rows a batch has.
            assert told["rows"] == (local["rows"] if index else 0)
            assert local["rows"] > 0
            words = str(lockstep.observe.Explanation(facts[index]))
            said = f"rows {local['rows']:,}" if index else "The rows of rows.weight come to that"
            assert said in " ".join(words.split())


def test_it_says_how_each_parameter_is_kept(tmp_path: Path) -> None:
    [facts, *_] = [
        both[1] for both in lockstep.launch(rank_of_net, 2, (tmp_path, False), ranks="threads")
    ]
    how = {one["name"]: one["how"] for one in facts["parameters"] + facts["buffers"]}
    assert how["rows.weight"].startswith("rows only")
    assert how["fixed.weight"].startswith("frozen")
    assert how["body.4.running_mean"].startswith("rank 0's values")
    assert how["body.0.weight"].startswith("bucket ")
    assert facts["shared"] == [["words.weight", "head.weight"]]
    names = [name for bucket in facts["buckets"] for name in bucket["parameters"]]
    trained = {n for n, p in Net().named_parameters() if p.requires_grad} - {"rows.weight"}
    assert sorted(names) == sorted(trained)
    assert facts["inputs"] == [{"name": "inputs[0]", "shape": [6], "rows": [3, 3]}]
    assert [b["when"] for b in facts["buckets"]][-1] == "at the end of the backward"
    assert "has come" in facts["buckets"][0]["when"]
    assert any("BatchNorm1d" in one["what"] for one in facts["unusual"])
    assert json.loads(json.dumps(facts)) == facts


def test_sharded_parameters_are_named(tmp_path: Path) -> None:
    [facts, *_] = [
        both[1] for both in lockstep.launch(rank_of_net, 2, (tmp_path, True), ranks="threads")
    ]
    how = {one["name"]: one["how"] for one in facts["parameters"]}
    assert "sharded optimizer" in how["body.0.weight"]


def explained(num_ranks: int, model: nn.Module, *inputs: Any, **options: Any) -> Any:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        local = lockstep.parallelize(copy.deepcopy(model), process_group=group, **options)
        return lockstep.explain(local, *inputs)

    return run_ranks(num_ranks, body)[0]


def test_it_prints_as_text_and_in_a_notebook() -> None:
    found = explained(2, Net(), torch.arange(7))
    assert str(found).startswith("Net, 1,096 parameters (72 frozen), kept in step by 2 ranks over")
    assert "rows by ranks: 4, 3" in str(found)
    assert "mean() of the losses" in str(found)
    assert "kept in step by" in found._repr_html_()
    assert repr(found) == "<Explanation of Net>"


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            nn.Embedding(200_000, 8),
            "sparse=True) sends the rows that are used, with SGD, Adagrad or",
        ),
        (nn.Linear(2, 2).double(), "in float64"),
        (nn.BatchNorm2d(2), "The model is a BatchNorm2d"),
        (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 300_000)), "More than half of the bytes"),
    ],
)
def test_what_is_unusual_is_named(model: nn.Module, words: str) -> None:
    if isinstance(model, nn.Sequential):
        model = nn.Sequential(*reversed(model))
    assert words in " ".join(str(explained(2, model)).split())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="huge pages are of glibc")
@pytest.mark.parametrize(
    "told", [{}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, {"MALLOC_MMAP_MAX_": "0"}], ids=str
)
def test_gradients_that_are_paged_in_anew_are_named(
    told: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_MAX_"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    found = explained(2, nn.Linear(4200, 2000, bias=False)).to_dict()["unusual"]
    said = [one for one in found if "weight takes more than 32 MiB" in one["what"]]
    assert len(said) == (not told)


def test_nothing_is_unusual_where_nothing_is() -> None:
    found = explained(2, nn.Linear(2, 2), torch.ones(4, 2)).to_dict()
    assert found["unusual"] == []


def test_parameters_that_are_not_sent_have_no_part_of_the_bytes() -> None:
    model = nn.Sequential(nn.Embedding(200_000, 8), nn.Linear(8, 2))
    model[0].requires_grad_(False)
    assert explained(2, model).to_dict()["unusual"] == []


def test_sparse_gradients_are_not_proposed_where_torch_has_none() -> None:
    assert explained(2, nn.EmbeddingBag(200_000, 8, mode="max")).to_dict()["unusual"] == []


def test_ignored_parameters_are_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model._ddp_params_and_buffers_to_ignore = ["0.weight"]
        wrapped = lockstep.DistributedDataParallel(model, process_group=group)
        return lockstep.explain(wrapped).to_dict()

    facts = run_ranks(2, body)[0]
    assert facts["parameters"][0]["how"] == "ignored: each rank's own"
    assert "0.weight differ between ranks" in facts["unusual"][0]["what"]
    assert facts["kind"] == "DistributedDataParallel"


def test_one_rank_and_plain_models() -> None:
    facts = lockstep.explain(lockstep.parallelize(nn.Linear(2, 2)), torch.ones(4, 2)).to_dict()
    assert facts["inputs"][0]["rows"] == [4]
    assert facts["bytes_per_step"] == {"gradients": 0, "rows": 0, "buffers": 0}
    assert "one rank" in facts["parameters"][0]["how"]
    assert "isn't parallel" in str(lockstep.explain(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="takes a module, and got a int"):
        lockstep.explain(3)  # type: ignore[arg-type]


def test_data_parallel() -> None:
    model = lockstep.DataParallel(Net(), ["cpu"] * 3)
    found = lockstep.explain(model, torch.arange(7))
    facts = found.to_dict()
    assert facts["inputs"][0]["rows"] == [3, 3, 1]
    size = sum(p.nbytes for p in Net().parameters())
    assert facts["bytes_per_step"] == {"copies of parameters": 0, "gradients of replicas": 2 * size}
    assert "in threads of their own" in " ".join(str(found).split())
    assert "launch()" in facts["unusual"][0]["mend"]


def explain_script(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "script.py"
    path.write_text("import torch, lockstep\nfrom torch import nn\nlockstep.init()\n" + text)
    command = [sys.executable, "-m", "lockstep", "explain", "-n", "2", str(path)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.forks
def test_the_command_explains_a_script_after_two_steps(tmp_path: Path) -> None:
    done = explain_script(
        tmp_path,
        """
model = lockstep.parallelize(nn.Linear(3, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1000):
    if number > 1:
        print("another step")
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
""",
    )
    assert done.returncode == 0, done.stderr
    assert "Linear, 8 parameters, kept in step by 2 ranks over shm" in done.stdout
    assert "All gradients are one bucket" in done.stdout
    assert "another step" not in done.stdout
    assert done.stdout.count("kept in step by") == 1


@pytest.mark.forks
def test_the_command_explains_a_script_that_takes_no_step(tmp_path: Path) -> None:
    done = explain_script(tmp_path, "model = lockstep.parallelize(nn.Linear(3, 2))")
    assert "In the first backward" in done.stdout
    assert "has no parallel model" in explain_script(tmp_path, "print(1)").stdout


def test_what_a_communication_hook_sends_is_not_told() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> str:
        model = lockstep.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
        model.register_comm_hook(group, allreduce_hook)
        return str(lockstep.explain(model))

    for told in run_ranks(2, body):
        assert "what that sends isn't known" in " ".join(told.split())


def test_buckets_of_a_hook_have_the_bytes_that_are_told_before_the_first_step() -> None:
    """A hook gets gradients, and no facts behind them."""

    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.DistributedDataParallel(
            nn.Sequential(*(nn.Linear(10, 10) for _ in range(3))),
            process_group=group,
            bucket_cap_mb=0.0005,
        )
        model.register_comm_hook(group, allreduce_hook)
        for _ in range(3):
            told = lockstep.explain(model).to_dict()
            assert [each["bytes"] for each in told["buckets"]] == [880, 440]
            assert told["bytes_per_step"]["gradients"] == 880 + 440
            model(torch.ones(2, 10)).sum().backward()

    run_ranks(2, body)
