"""Values of all ranks together: N ranks on their parts give what one process gives on the whole."""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import lockstep
from lockstep.errors import CollectiveFailed, CollectiveMismatch, CollectiveTimeout
from lockstep.integrations import gather_all_tensors
from lockstep.metrics import Op
from tests.counts import num_examples
from tests.ranks import BACKENDS, run_ranks

NAN = math.nan
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Metrics:
    loss: Any
    rest: Any = dataclasses.field(init=False, default=0)


def reduce_on(trees: list[Any], op: Op, backend: str = "threads", **kwargs: Any) -> list[Any]:
    """What each rank gets; ``weight`` has one for each rank."""
    weights = kwargs.pop("weight", [None] * len(trees))

    def body(rank: int, group: dist.ProcessGroup) -> Any:
        return lockstep.reduce(trees[rank], op, weight=weights[rank], process_group=group)

    return run_ranks(len(trees), body, backend=backend)


def assert_values(actual: Any, expected: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


# What comes out.


@pytest.mark.parametrize("backend", [*BACKENDS, "shm"])
def test_reduce_keeps_the_nesting(backend: str) -> None:
    def tree(rank: int) -> Any:
        metrics = Metrics(torch.tensor([1.0, rank]))
        object.__setattr__(metrics, "rest", 2 * rank)
        counts = collections.defaultdict(int, {"b": rank, 3: True})
        return {"m": metrics, "pair": Pair([rank], (0.5, ())), "counts": counts, "empty": {}}

    for result in reduce_on([tree(0), tree(1), tree(2)], "sum", backend):
        assert_values(result["m"].loss, torch.tensor([3.0, 3.0]))
        assert (type(result["m"]), result["m"].rest) == (Metrics, 6)
        assert result["pair"] == Pair([3], (1.5, ()))
        assert isinstance(result["pair"], Pair)
        assert isinstance(result["counts"], collections.defaultdict)
        assert (result["counts"], [*result["counts"]]) == ({"b": 3, 3: 3}, ["b", 3])
        assert result["empty"] == {}


def test_reduce_takes_dicts_that_ranks_filled_in_different_orders() -> None:
    trees = [{"a": 1, "b": torch.tensor(2), "c": torch.tensor(0.5)} for _ in range(2)]
    trees[1] = dict(reversed(trees[1].items()))
    for op, c in (("sum", 1.0), ("max", 0.5), ("mean", 0.5)):
        for result, keys in zip(reduce_on(trees, op), ("abc", "cba"), strict=True):
            assert "".join(result) == keys
            assert_values(result["c"], torch.tensor(c))


@pytest.mark.parametrize(
    ("values", "op", "expected"),
    [
        ([2**70, 1, -3], "sum", 2**70 - 2),
        ([2**70, 2**70 + 1], "max", 2**70 + 1),
        ([2**53 + 1, 2**53], "min", 2**53),
        ([True, False, True], "sum", 2),
        ([True, False], "min", False),
        ([0, 0.5], "sum", 0.5),  # a rank that had no batch to add to its 0
        ([1, 2, 4], "mean", 7 / 3),
        ([1.0, NAN], "max", NAN),
        ([NAN, 1.0], "min", NAN),
        ([math.inf, -math.inf], "sum", NAN),
        ([0.1, 0.2], "sum", 0.1 + 0.2),
    ],
)
def test_reduce_of_numbers(values: list[Any], op: Op, expected: Any) -> None:
    for result in reduce_on(values, op):
        assert_values(result, expected)
        assert type(result) is type(expected)


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max"])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, torch.uint16, torch.complex64])
def test_reduce_of_tensors_is_torchs_over_the_ranks(op: Op, dtype: torch.dtype) -> None:
    if dtype.is_complex and op in ("min", "max"):
        pytest.skip("complex numbers have no order")
    values = [torch.tensor([[0, 1, 100]]).add(7 * rank).to(dtype) for rank in range(3)]
    is_whole = not (dtype.is_floating_point or dtype.is_complex)
    wide = torch.stack(values).to(torch.complex128 if dtype.is_complex else torch.float64)
    combine = {"sum": torch.sum, "mean": torch.mean, "min": torch.amin, "max": torch.amax}[op]
    of_whole = {"sum": torch.int64, "mean": torch.float64}.get(op, dtype)
    expected = combine(wide, dim=0).to(of_whole if is_whole else dtype)
    for result in reduce_on(values, op):
        assert_values(result, expected)


def test_reduce_of_integers_is_exact() -> None:
    values = [torch.tensor([2**62, 2**53 + 1]), torch.tensor([2**62 - 1, 2**53])]
    assert_values(reduce_on(values, "sum")[1], torch.tensor([2**63 - 1, 2**54 + 1]))
    assert_values(reduce_on(values, "min")[1], torch.tensor([2**62 - 1, 2**53]))
    small = [torch.tensor([200], dtype=torch.uint8)] * 2
    assert_values(reduce_on(small, "sum")[1], torch.tensor([400]))


def test_reduce_of_tensors_has_nan_where_any_has() -> None:
    values = [torch.tensor([NAN, 1.0, -0.0]), torch.tensor([2.0, NAN, 0.0])]
    for op, last in (("min", -0.0), ("max", 0.0)):
        for result in reduce_on(values, op):
            assert_values(result, torch.tensor([NAN, NAN, last]))


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=num_examples(60))
@given(data=st.data())
def test_weighted_mean_of_ranks_is_that_of_one_process(backend: str, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(sum))
    values = torch.randn(sum(sizes), 3, dtype=torch.float64).split(sizes)
    trees = [{"loss": part.mean(0), "one": part[:, 0].mean().item()} for part in values]
    expected = {"loss": torch.cat(values).mean(0), "one": torch.cat(values)[:, 0].mean().item()}
    results = reduce_on(trees, "mean", backend, weight=sizes)  # NaN on a rank of weight 0
    for result in results:
        assert_values(result, expected, rtol=1e-12, atol=1e-12)
        assert_values(result, results[0])


def test_weighted_mean_by_a_tensor_is_that_of_each_element() -> None:
    values = [torch.tensor([[1.0, NAN], [3.0, 4.0]]), torch.tensor([[5.0, 6.0], [7.0, 8.0]])]
    weights = [torch.tensor([1, 0]), torch.tensor([3, 0])]
    for result in reduce_on(values, "mean", weight=weights):
        assert_values(result, torch.tensor([[4.0, NAN], [6.0, NAN]]))


def test_weights_are_those_of_many_samples() -> None:
    assert reduce_on([0.0, 1.0], "mean", weight=[2**24 + 1, 1]) == [1 / (2**24 + 2)] * 2


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=num_examples(60))
@given(data=st.data())
def test_concatenation_of_ranks_is_that_of_one_process(backend: str, data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 4))
    dtypes = data.draw(st.lists(st.sampled_from(FLOATS + WHOLE), max_size=3))
    trailing = data.draw(st.lists(st.integers(0, 3), max_size=2))
    trees = []
    for _ in range(num_ranks):
        rows = [data.draw(st.integers(0, 4)) for _ in dtypes]
        values = [torch.randint(2, (n, *trailing)) for n in rows]
        trees.append([x.to(dtype) for x, dtype in zip(values, dtypes, strict=True)])
    expected = [torch.cat(parts) for parts in zip(*trees, strict=True)]
    for result in reduce_on(trees, "cat", backend):
        assert_values(result, expected)


def test_concatenation_takes_tensors_of_any_strides_and_none() -> None:
    values = [torch.tensor(1 + 2j), torch.ones(4, dtype=torch.complex64)[::2].conj()]
    for result in reduce_on(values, "cat"):
        assert_values(result, torch.tensor([1 + 2j, 1, 1]))


def test_results_are_detached_and_the_values_stay() -> None:
    value = torch.ones(2, requires_grad=True)
    results = reduce_on([value, value], "sum")
    assert not results[0].requires_grad
    assert_values(value.detach(), torch.ones(2))
    with torch.inference_mode():
        assert_values(lockstep.reduce(torch.ones(2), "sum").clone(), torch.ones(2))


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "cat"])
def test_one_rank_gets_its_own_values(op: Op) -> None:
    tree = {"a": torch.tensor([1.5]), "n": 3} if op != "cat" else {"a": torch.tensor([1.5])}
    assert_values(
        lockstep.reduce(tree, op),
        tree | ({"n": 3.0} if op == "mean" else {}),
    )
    assert_values(reduce_on([tree], op)[0], lockstep.reduce(tree, op))
    assert lockstep.reduce(tree, op)["a"] is not tree["a"]


# What is refused.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("trees", "op", "message"),
    [
        (
            [{"l": torch.ones(4)}, {"l": torch.ones(3)}],
            "sum",
            r"tree\['l'\] is a tensor \(3,\) float32 on rank 1 and a tensor \(4,\) float32 on rank",
        ),
        (
            [torch.ones(1), torch.ones(1).half()],
            "sum",
            r"tree is a tensor \(1,\) float16 on rank 1",
        ),
        ([1, torch.ones(())], "max", r"tree is a tensor \(\) float32 on rank 1 and a number on"),
        ([[1, 2], [1]], "sum", r"tree\[1\] is missing on rank 1 and a number on rank 0"),
        (
            [{"a": 1}, {"a": 1, "b": 1}],
            "mean",
            r"tree\['b'\] is .* on rank 1 and missing on rank 0",
        ),
        ([torch.ones(2, 3), torch.ones(1, 4)], "cat", r"is rows \(4,\) float32 on rank 1"),
        ([{"a": 1}, {"a": "one"}], "sum", r"refused \(tree\['a'\] is 'one' \(str\), not a number"),
    ],
)
def test_ranks_that_ask_for_something_else_are_named_on_every_rank(
    backend: str, trees: list[Any], op: Op, message: str
) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        tree = trees[min(rank, 1)] if rank != 2 else trees[0]
        if rank == 1 and "refused" in message:
            with pytest.raises(TypeError, match="is 'one'"):
                lockstep.reduce(tree, op, process_group=group)
        else:
            with pytest.raises(CollectiveMismatch, match=message) as caught:
                lockstep.reduce(tree, op, process_group=group)
            assert caught.value.ranks == (1,)
        return lockstep.reduce(rank, "sum", process_group=group)  # the group works on

    assert run_ranks(3, body, backend=backend) == [3, 3, 3]


def test_ranks_that_ask_for_another_op_or_weight_are_named_on_every_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        with pytest.raises(CollectiveMismatch, match="op is 'max' on rank 1 and 'min' on"):
            lockstep.reduce(1, ("min", "max")[rank], process_group=group)
        weight = (2, torch.ones(3))[rank]
        with pytest.raises(
            CollectiveMismatch, match=r"weight is a tensor \(3,\) float64 on rank 1"
        ):
            lockstep.reduce(torch.ones(3), weight=weight, process_group=group)
        with pytest.raises(ValueError, match="All ranks gave a weight of 0"):
            lockstep.reduce(torch.ones(3), weight=0, process_group=group)

    run_ranks(2, body)


def test_rank_that_does_not_come_is_named() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        if rank:
            return
        with pytest.raises((CollectiveTimeout, lockstep.errors.PeerLost)) as caught:
            lockstep.reduce(1, "sum", process_group=group)
        assert caught.value.ranks == (1,)

    run_ranks(2, body, group_timeout_seconds=1)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"tree": 1, "op": "avg"}, ValueError, "op is 'avg'.* 'sum', 'mean', 'min', 'max', 'cat'"),
        ({"tree": 1, "op": ["sum"]}, ValueError, "op is"),
        ({"tree": {"a": None}, "op": "sum"}, TypeError, r"tree\['a'\] is None"),
        ({"tree": 1j, "op": "sum"}, TypeError, "tree is 1j"),
        ({"tree": [3], "op": "cat"}, TypeError, r"tree\[0\] is 3 \(int\), not a tensor to concat"),
        ({"tree": torch.ones(1) * 1j, "op": "max"}, TypeError, "a tensor of which there is a max"),
        ({"tree": torch.ones(1, dtype=torch.uint64), "op": "min"}, TypeError, "there is a min"),
        ({"tree": torch.eye(2).to_sparse(), "op": "sum"}, TypeError, "tree is"),
        ({"tree": 10**400}, OverflowError, "too large"),
        ({"tree": 1, "weight": -1}, ValueError, "weight is -1"),
        ({"tree": 1, "weight": NAN}, ValueError, "weight is nan"),
        ({"tree": 1, "weight": "1"}, TypeError, "weight is '1'"),
        ({"tree": 1.0, "weight": 0}, ValueError, "weight of 0"),
        ({"tree": 1, "op": "sum", "weight": 2}, ValueError, "weight is for a mean"),
        (
            {"tree": {"a": torch.ones(2)}, "weight": torch.ones(3)},
            ValueError,
            r"weight is \(3,\), which can't be broadcast to tree\['a'\], \(2,\)",
        ),
        ({"tree": 1, "process_group": 3}, TypeError, "process_group"),
    ],
    ids=str,
)
def test_reduce_refuses_what_makes_no_sense(
    arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        lockstep.reduce(**arguments)


def test_reduce_is_refused_in_join() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> Any:
        model = lockstep.parallelize(torch.nn.Linear(1, 1), process_group=group)
        with pytest.raises(CollectiveFailed, match="inside of join"), lockstep.join(model):
            lockstep.reduce(1, "sum", process_group=group)
        return lockstep.reduce(1, "sum", process_group=group)

    assert run_ranks(2, body) == [2, 2]


# torchmetrics' function. tests/clients has it in torchmetrics.


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_all_tensors_takes_any_shapes(backend: str) -> None:
    tensors = [torch.ones(2, 3), torch.tensor([]), torch.full((1, 4), 2.0)]

    def body(rank: int, group: dist.ProcessGroup) -> None:
        gathered = gather_all_tensors(tensors[rank], group)
        assert_values(gathered, [tensors[0], torch.empty(0, 3), tensors[2]])
        assert rank == 1 or gathered[rank] is tensors[rank]
        # torchmetrics fills the state of a rank without data with an empty tensor of float32.
        targets = [torch.tensor([1, 2]), torch.tensor([]), torch.tensor([3])][rank]
        assert_values(torch.cat(gather_all_tensors(targets, group)), torch.tensor([1, 2, 3]))
        assert_values(gather_all_tensors(torch.tensor([]), group), [torch.tensor([])] * 3)
        assert_values(gather_all_tensors(torch.tensor(rank), group), [*torch.arange(3)])
        # A state to add to stays a number of float32, or whole, on a rank without data.
        sums = [torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.0), torch.tensor(0)][rank]
        total = torch.stack(gather_all_tensors(sums, group))
        assert_values(total, torch.tensor([0.5, 0, 0], dtype=torch.float64))
        parts = [torch.ones(2).half(), torch.tensor([]).double(), torch.ones(1).bfloat16()][rank]
        assert_values(torch.cat(gather_all_tensors(parts, group)), torch.ones(3))
        labels = torch.ones(2, dtype=torch.int64 if rank == 1 else torch.float32)
        with pytest.raises(CollectiveMismatch, match="int64 of 1 dimensions on rank 1 and"):
            gather_all_tensors(labels, group)
        other = torch.ones(1) if rank == 2 else torch.ones(1, 1)
        with pytest.raises(CollectiveMismatch, match="of 1 dimensions on rank 2 and"):
            gather_all_tensors(other, group)

    run_ranks(3, body, backend=backend)
