"""Gradients of large embeddings, of which only the rows travel that some rank has looked up.

To the program they are dense: as of one process, and in every bit as if all of them had travelled.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import CollectiveFailed, ModelError
from lockstep.grad import RowGradient, row_tables
from lockstep.nn.backward import engines_with
from tests.counts import num_examples
from tests.nn.parallel import BOTH, in_place
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of, values_of

ROWS, WIDTH = 40, 3
MODES = ["sum", "mean", "max"]


@contextmanager
def tables_from(num_bytes: int) -> Iterator[None]:
    """Let gradients of tables of this size and larger ones travel by rows."""
    before = row_tables.MIN_TABLE_BYTES
    row_tables.MIN_TABLE_BYTES = num_bytes
    try:
        yield
    finally:
        row_tables.MIN_TABLE_BYTES = before


def by_rows(model: nn.Module) -> bool:
    """Whether the gradient of the model's table was sent by rows in the last backward."""
    (engine,) = engines_with([*model.parameters()])
    return any(
        type(bucket).__name__ == "RowBucket" and bucket.num_bytes < bucket.contents.num_bytes
        for bucket in engine.reducer._buckets
    )


class Table(nn.Module):
    """A table that is looked up in one way, and a layer."""

    def __init__(
        self, kind: str = "embedding", mode: str = "sum", padding: int | None = None
    ) -> None:
        super().__init__()
        is_bag = kind in ("bags", "weighted", "last")
        options: dict[str, Any] = {"padding_idx": padding}
        if is_bag:
            options |= {"mode": mode, "include_last_offset": kind == "last"}
        self.table = (nn.EmbeddingBag if is_bag else nn.Embedding)(ROWS, WIDTH, **options)
        self.layer = nn.Linear(WIDTH, 2)
        self.kind, self.padding = kind, padding

    def look_up(self, words: torch.Tensor) -> torch.Tensor:
        """Return a row for each row of ``words``."""
        if self.kind == "function":
            return F.embedding(words, self.table.weight, self.padding).sum(1)
        if self.kind == "embedding":
            return self.table(words).sum(1)
        if isinstance(self.table, nn.EmbeddingBag) and not words.numel():
            ends = int(self.kind == "last")
            weights = words.flatten().to(self.layer.weight.dtype)
            options = {"per_sample_weights": weights} if self.kind == "weighted" else {}
            starts = torch.zeros(len(words) + ends, dtype=torch.int64)
            return self.table(words.flatten(), starts, **options)
        if self.kind == "weighted":
            weights = words.to(self.layer.weight.dtype) + self.layer.bias.sum()
            return self.table(words, per_sample_weights=weights)
        if self.kind == "last":
            ends = [max(0, words.numel() - 1)] * (len(words) - 1)  # bags in between are empty
            return self.table(words.flatten(), torch.tensor([0, *ends, words.numel()]))
        return self.table(words)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.look_up(words)))


def build(dtype: torch.dtype = torch.float64, **options: Any) -> Table:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return Table(**options).to(dtype)


class Step(NamedTuple):
    """What the ranks do in one step: what differs between them, and what doesn't."""

    words: list[list[list[int]]]  # by rank, indices of rows, as many in each list
    also: list[str]  # by rank, what gives the table a gradient besides the lookup, or takes it away
    how: str = ""  # of the backward
    after: str = ""  # what the program does with the gradients
    zeroes: str = "none"


ALSO = ["", "", "", "twice", "tied", "penalty", "thrice", "unused", "few", "hook"]
HOW = ["", "", "", "no_sync", "graph", "checkpoint", "reentrant", "grad"]
AFTER = ["", "", "clip", "hold", "write", "past", "array", "double"]
ZEROES = ["none", "none", "none", "zero", "keep"]


@st.composite
def steps(draw: st.DrawFn, num_ranks: int, num_steps: int = 6) -> list[Step]:
    def words() -> list[list[int]]:
        length = draw(st.integers(0, 3))
        row = st.lists(st.integers(0, ROWS - 1), min_size=length, max_size=length)
        return draw(st.lists(row, min_size=1, max_size=4))

    plan = []
    for _ in range(num_steps):
        is_plain = draw(st.booleans())
        also = [draw(st.sampled_from(ALSO[:3] if is_plain else ALSO)) for _ in range(num_ranks)]
        options = () if is_plain else map(draw, map(st.sampled_from, (HOW, AFTER, ZEROES)))
        plan.append(Step([words() for _ in range(num_ranks)], also, *options))
    return plan


def loss_of(model: Table, step: Step, rank: int) -> torch.Tensor:
    words, also = torch.tensor(step.words[rank], dtype=torch.int64), step.also[rank]
    if words.numel() == 0:
        words = words.view(len(step.words[rank]), 0)
    weight = model.table.weight
    if step.how == "reentrant" and also != "unused":
        also = ""  # LateGradient would tell to repeat the step
    if also == "unused":
        return model.layer(torch.ones(1, WIDTH, dtype=weight.dtype)).square().mean()
    forward: Callable[[torch.Tensor], torch.Tensor] = model
    if step.how in ("checkpoint", "reentrant"):
        is_reentrant = step.how == "reentrant"
        again = weight.detach().sum().requires_grad_()  # a segment of it needs one that requires it

        def forward(words: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda w, _: model(w), words, again, use_reentrant=is_reentrant)

    loss = forward(words[:, :1].contiguous() if also == "few" else words).square().mean()
    if also in ("twice", "thrice"):
        loss = loss + model(words.flip(0)).sum()
    if also == "thrice":
        loss = loss + (model.look_up(words) @ weight.T).tanh().mean()
    if also == "tied":
        loss = (model.look_up(words) @ weight.T).tanh().square().mean() + loss
    if also == "penalty":
        loss = loss + weight.square().mean()
    return loss


def _rest(step: Step) -> int:
    used = {word for words in step.words for row in words for word in row}
    return next(number for number in range(ROWS) if number not in used)


def take(model: Table, step: Step, backward: Callable[[bool], None]) -> list[Any]:
    """Take a step, and return what the program sees of gradients in it."""
    weight, seen = model.table.weight, []
    handle = None
    if "hook" in step.also:
        handle = weight.register_hook(lambda gradient: gradient * 2)
    if step.how == "no_sync":
        backward(False)
    backward(True)
    if handle is not None:
        handle.remove()
    if step.after == "clip":
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01))
    if weight.grad is not None:
        assert type(weight.grad) is torch.Tensor
        assert weight.grad.is_contiguous()
    if step.after == "write" and weight.grad is not None:
        weight.grad.add_(weight.detach(), alpha=0.1)
    if step.after == "past" and weight.grad is not None:
        weight.grad.data.add_(weight.detach(), alpha=0.1)
    if step.after == "array" and weight.grad is not None:  # of a row that nobody looks up
        weight.grad.numpy()[_rest(step)] += 1
    return [*seen, *gradients_of(model)]


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def take_all(
    model: Table, plan: Sequence[Step], optimizer: str, backward_of: Callable[[Step, bool], None]
) -> list[Any]:
    """Take the steps of a plan, and return what the program has seen in each."""
    stepping = OPTIMIZERS[optimizer](model.parameters())
    seen, held = [], []
    for step in plan:
        seen.append(take(model, step, partial(backward_of, step)))
        stepping.step()
        if step.after == "hold" and model.table.weight.grad is not None:
            held.append((model.table.weight.grad, model.table.weight.grad.clone()))
        if step.zeroes != "keep":
            stepping.zero_grad(set_to_none=step.zeroes == "none")
            for one, as_it_was in held:
                if step.zeroes == "none":
                    torch.testing.assert_close(one, as_it_was, rtol=0, atol=0)
        if step.zeroes != "none":
            held = []  # autograd, or zero_grad(), writes to what is still the gradient
    return [*seen, values_of(model)]


def train_rank(
    model: Table,
    plan: Sequence[Step],
    optimizer: str,
    parallel: Callable[..., nn.Module],
    rank: int,
    group: dist.ProcessGroup,
) -> list[Any]:
    outer = parallel(copy.deepcopy(model), group)
    inner: Table = getattr(outer, "module", outer)

    def backward(step: Step, syncs: bool) -> None:
        loss = loss_of(inner, step, rank)
        if step.how == "grad":
            torch.autograd.grad(loss, inner.layer.weight, retain_graph=True)
            found = torch.autograd.grad(
                loss, inner.table.weight, retain_graph=True, allow_unused=True
            )
            assert type(found[0]) in (torch.Tensor, type(None))
        with nullcontext() if syncs else lockstep.no_sync(outer):
            loss.backward(create_graph=step.how == "graph")
        if step.how == "graph":  # without which autograd warns of a cycle
            for parameter in inner.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.detach()

    seen = take_all(inner, plan, optimizer, backward)
    return [*seen, [torch.tensor(by_rows(inner))]]


def train_alone(model: Table, plan: Sequence[Step], optimizer: str, num_ranks: int) -> list[Any]:
    model = copy.deepcopy(model)

    def backward(step: Step, syncs: bool) -> None:
        losses = [loss_of(model, step, rank) for rank in range(num_ranks)]
        # A rank's own hook sees its own gradient, and doubles it.
        (torch.stack(losses).sum() / num_ranks).backward()

    return take_all(model, plan, optimizer, backward)


def bits_of(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def equal_bits(mine: Sequence[torch.Tensor | None], theirs: Sequence[torch.Tensor | None]) -> bool:
    return [*map(bits_of, mine)] == [*map(bits_of, theirs)]


def check(
    model: Table,
    plan: Sequence[Step],
    num_ranks: int = 2,
    optimizer: str = "sgd",
    backend: str = "threads",
    parallel: Callable[..., nn.Module] = in_place,
) -> bool:
    """Compare with one process and with dense gradients; return whether rows travelled at last."""
    body = partial(train_rank, model, plan, optimizer, parallel)
    with tables_from(1):
        rows = run_ranks(num_ranks, body, backend=backend)
    with tables_from(2**60):
        whole = run_ranks(num_ranks, body, backend=backend)
    for by_row, dense in zip(rows, whole, strict=True):
        for number, (mine, theirs) in enumerate(zip(by_row[:-1], dense[:-1], strict=True)):
            if backend == "gloo" and num_ranks > 2:  # which adds up in orders of its own
                assert_same(mine, theirs, single=1e-4)
            else:
                assert equal_bits(mine, theirs), f"step {number}"
    if model.table.weight.dtype is torch.float64:
        for mine, theirs in zip(
            rows[0][:-1], train_alone(model, plan, optimizer, num_ranks), strict=True
        ):
            assert_same(mine, theirs, 1e-12)
    assert not any(dense[-1][0] for dense in whole)
    return all(bool(by_row[-1][0]) for by_row in rows)


def plain(num_ranks: int, num_steps: int = 4, **last: Any) -> list[Step]:
    """Lookups of a few rows, some of them several times, and in the last step something else."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(num_steps):
        words = torch.randint(0, ROWS, (num_ranks, 3, 2), generator=generator).tolist()
        is_last = number == num_steps - 1
        step = Step(words, [""] * num_ranks)
        found.append(step._replace(**last) if is_last else step)
    return found


KINDS = [
    ("embedding", "sum"), ("function", "sum"), ("bags", "sum"), ("bags", "mean"), ("bags", "max"),
    ("weighted", "sum"), ("last", "mean"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "mode"), KINDS)
@pytest.mark.parametrize("padding", [None, 7])
def test_rows_travel_and_the_gradient_is_the_dense_one(
    kind: str, mode: str, padding: int | None
) -> None:
    model = build(kind=kind, mode=mode, padding=padding)
    assert check(model, plain(3), num_ranks=3)


@BOTH
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_rows_travel_over_every_group_and_in_wrappers(
    backend: str, parallel: Callable[..., nn.Module]
) -> None:
    plan = plain(2, also=["twice", "unused"], after="clip")
    assert check(build(kind="bags"), plan, 2, "momentum", backend, parallel)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_dense_gradients_at_any_number_of_ranks(
    num_ranks: int, dtype: torch.dtype
) -> None:
    assert check(build(dtype), plain(num_ranks, 5), num_ranks, "adam", "shm")


@given(
    plan=steps(2),
    kind=st.sampled_from(KINDS),
    padding=st.sampled_from([None, 0, 7]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float32]),
)
@settings(max_examples=num_examples(400, 25), deadline=None)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_whatever_the_program_does_the_gradient_is_the_dense_one(
    plan: list[Step],
    kind: tuple[str, str],
    padding: int | None,
    optimizer: str,
    dtype: torch.dtype,
) -> None:
    model = build(dtype, kind=kind[0], mode=kind[1], padding=padding)
    check(model, plan, optimizer=optimizer)


def one_step(model: nn.Module, words: torch.Tensor) -> None:
    model.zero_grad()
    model(words).square().mean().backward()


def words_of(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, ROWS, (3, 1), generator=generator)


def test_only_rows_of_a_large_table_travel_with_their_indices() -> None:
    base = nn.Sequential(nn.EmbeddingBag(40_000, 64), nn.Linear(64, 1))

    def body(rank: int, group: dist.ProcessGroup) -> tuple[int, int]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        words = torch.arange(300).view(100, 3) * (rank + 1)
        for _ in range(3):
            one_step(model, words)
        (engine,) = engines_with([*model.parameters()])
        (sent,) = [b.num_bytes for b in engine.reducer._buckets if type(b).__name__ == "RowBucket"]
        explanation = lockstep.explain(model)
        told = {one["name"]: one["how"] for one in explanation.to_dict()["parameters"]}
        assert "of which the rows travel" in told["0.weight"]
        assert "sparse=True" not in str(explanation)
        return sent, explanation.to_dict()["bytes_per_step"]["gradients"]

    for sent, told in run_ranks(2, body):
        assert sent == 300 * (64 * 4 + 8)
        assert sent < told < 2 * sent


def test_a_table_that_also_has_other_gradients_is_in_an_ordinary_bucket_again() -> None:
    """So that it is sent while the backward goes on."""

    def body(rank: int, group: dist.ProcessGroup) -> list[list[str]]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        kinds = []
        for step in range(7):
            model.zero_grad()
            loss = model(words_of(rank, step)).square().mean()
            if rank == 1 and step > 1:
                loss = loss + model.table.weight.square().mean()
            loss.backward()
            (engine,) = engines_with([*model.parameters()])
            kinds.append(sorted(type(bucket).__name__ for bucket in engine.reducer._buckets))
        return kinds

    base = build()
    with tables_from(1):
        for kinds in run_ranks(2, body):
            assert kinds == [["Bucket"], *[["Bucket", "RowBucket"]] * 4, ["Bucket"], ["Bucket"]]


def test_a_backward_that_fails_on_one_rank_leaves_plain_gradients() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)

        def fail(_: torch.Tensor) -> None:
            raise ArithmeticError("as a hook of the program may")

        for step in range(5):
            model.zero_grad()
            earlier = torch.ones((), requires_grad=True) * 1  # its backward comes last
            hidden = model(words_of(rank, step))
            if step == 3 and rank == 1:
                earlier.register_hook(fail)
                loss = hidden.square().mean()
                with pytest.raises(ArithmeticError):  # once the table has its gradient
                    torch.autograd.backward([loss, earlier])
                assert type(model.table.weight.grad) in (torch.Tensor, type(None))
            elif step == 3:
                with pytest.raises(CollectiveFailed):
                    hidden.square().mean().backward()
                assert model.table.weight.grad is None
            else:
                hidden.square().mean().backward()
        assert by_rows(model)
        return gradients_of(model)

    base = build()
    with tables_from(1):
        mine = run_ranks(2, body)
    with tables_from(2**60):
        alone = copy.deepcopy(base)
        torch.stack(
            [alone(words_of(rank, 4)).square().mean() for rank in range(2)]
        ).mean().backward()
    for each in mine:
        assert_same(each, gradients_of(alone))


def test_writes_past_the_count_of_writes_change_nothing() -> None:
    """torch counts neither what is written to ``p.grad.data`` nor to an array of its memory."""
    for after in "past", "array":
        once = plain(2, 8, after=after)  # as late as somebody would no longer look for it
        assert check(build(), once + plain(2, 3, after=after)[-1:] * 2 + plain(2, 3))


def test_sharded_optimizers_get_the_dense_gradient() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        optimizer = lockstep.shard_optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        for step in range(4):
            one_step(model, words_of(rank, step))
            optimizer.step()
        return values_of(model)

    base = build()
    alone, stepping = copy.deepcopy(base), None
    stepping = torch.optim.Adam(alone.parameters(), lr=0.1)
    for step in range(4):
        stepping.zero_grad()
        losses = [alone(words_of(rank, step)).square().mean() for rank in range(2)]
        torch.stack(losses).mean().backward()
        stepping.step()
    with tables_from(1):
        for each in run_ranks(2, body):
            assert_same(each, values_of(alone))


def test_ranks_without_data_take_part() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.join(model):
            for step in range(3 + 2 * rank):
                one_step(model, words_of(rank, step))
                optimizer.step()
        return values_of(model)

    base = build()
    with tables_from(1):
        rows = run_ranks(2, body)
    with tables_from(2**60):
        dense = run_ranks(2, body)
    for mine, theirs in zip(rows, dense, strict=True):
        assert equal_bits(mine, theirs)


def test_a_mean_over_uneven_batches_is_that_of_one_process() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = lockstep.parallelize(copy.deepcopy(base), process_group=group)
        for step in range(4):
            model.zero_grad()
            words = words_of(rank, step)[: 3 - rank]
            lockstep.mean(model(words).square().sum(1), process_group=group).backward()
        assert by_rows(model)
        return gradients_of(model)

    base = build()
    alone = copy.deepcopy(base)
    alone(torch.cat([words_of(0, 3), words_of(1, 3)[:2]])).square().sum(1).mean().backward()
    with tables_from(1):
        for each in run_ranks(2, body):
            assert_same(each, gradients_of(alone))


@pytest.mark.parametrize("rows", [[], [0], [2, 5]])
def test_a_gradient_of_rows_is_a_dense_tensor_to_everybody(rows: list[int]) -> None:
    values = torch.randn(len(rows), 2)
    whole = torch.zeros(6, 2).index_copy_(0, torch.tensor(rows, dtype=torch.int64), values)

    def made() -> RowGradient:
        return RowGradient(torch.tensor(rows, dtype=torch.int64), values.clone(), (6, 2))

    assert torch.equal(made() * 2, whole * 2)
    assert torch.equal(torch.ones(6, 2) + made(), torch.ones(6, 2) + whole)
    assert torch.equal(torch.ones(6, 2).add_(made(), alpha=3), torch.ones(6, 2) + 3 * whole)
    assert torch.equal((made() + made()).as_dense(), whole + whole)
    assert type(made() * 2) is torch.Tensor
    written = made()
    alias = written.detach()
    assert written.add_(1) is written
    assert torch.equal(alias.as_dense(), whole + 1)
    assert alias.computed_rows() is None
    assert made().tolist() == whole.tolist()
    assert made().numpy().tolist() == whole.tolist()
    assert repr(made()) == repr(whole)
    assert torch.equal(copy.deepcopy(made()), whole)
    assert torch.equal(torch.load(io.BytesIO(saved(made()))), whole)
    assert made().norm() == whole.norm()


def saved(tensor: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


def test_sums_of_rows_have_the_signs_of_zeros_of_dense_ones() -> None:
    shape, zero = (3, 1), torch.tensor([[-0.0]])
    first = RowGradient(torch.tensor([0]), zero, shape)
    for at in (0, 1):
        second = RowGradient(torch.tensor([at]), zero, shape)
        total = first + second
        assert total.computed_rows() is not None
        assert bits_of(total.as_dense()) == bits_of(first.as_dense() + second.as_dense())
        first = RowGradient(torch.tensor([0]), zero, shape)


def test_scale_grad_by_freq_of_a_functions_lookup_is_refused() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = lockstep.parallelize(build(), process_group=group)
        weight = model.table.weight
        with pytest.raises(ModelError, match="scale_grad_by_freq"):
            F.embedding(words_of(rank), weight, scale_grad_by_freq=True)
        with pytest.raises(ModelError, match="scale_grad_by_freq"):
            F.embedding_bag(words_of(rank), weight, scale_grad_by_freq=True)
        with torch.no_grad():
            F.embedding(words_of(rank), weight, scale_grad_by_freq=True)

    run_ranks(2, body)


def test_rows_that_are_not_finite_blame_their_rank() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int | None]:
        model = lockstep.parallelize(build(), process_group=group)
        optimizer, blamed = torch.optim.SGD(model.parameters(), lr=0.1), list[int | None]()
        for fails in (False, False, True):
            with lockstep.guard(model, optimizer) as step:
                words = torch.tensor([[rank, 2]])
                rows = model.look_up(words)
                if fails and rank == 1:
                    rows.register_hook(lambda gradient: gradient * float("nan"))
                model.layer(rows).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
            if step.blame is not None:
                assert step.blame.nonfinite == ("table.weight",)
                blamed.append(step.blame.rank)
        assert by_rows(model)
        return blamed

    with tables_from(1):
        assert run_ranks(2, body) == [[1], [1]]


def test_a_hook_sees_the_rows_of_its_own_backward() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, seen = lockstep.parallelize(build(), process_group=group), list[float]()
        weight = model.table.weight
        node = torch.autograd.graph.get_gradient_edge(weight).node
        node.register_hook(lambda *_: seen.append(float(weight.grad[5 + len(seen)].abs().sum())))
        for step in range(4):
            model(torch.tensor([[5 + step]])).sum().backward()
            assert type(weight.grad) is torch.Tensor
            model.zero_grad()
        assert len(seen) == 4
        assert all(seen)

    with tables_from(1):
        run_ranks(2, body)


def test_a_hook_writes_to_the_rows_of_its_own_backward() -> None:
    base = build()  # not in threads, which have one random state

    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
        model, found = lockstep.parallelize(copy.deepcopy(base), process_group=group), []
        weight = model.table.weight
        node = torch.autograd.graph.get_gradient_edge(weight).node

        def scale(*_: Any) -> None:
            weight.grad.mul_(4)

        node.register_hook(scale)
        for step in range(4):
            model(torch.tensor([[5 + step, rank]])).sum().backward()
            found.append(weight.grad)
            weight.grad = None
        return found

    results = []
    for num_bytes in (1, 10**9):
        with tables_from(num_bytes):
            results.append(run_ranks(2, body))
    for by_row, whole in zip(*results, strict=True):
        assert_same(by_row, whole, 0)


def test_calls_on_lists_of_row_gradients_write_to_them() -> None:
    gradient = RowGradient(torch.tensor([1, 2]), torch.ones(2, 3), (5, 3))
    torch._foreach_mul_([gradient], 2)
    assert gradient.sum() == 12
