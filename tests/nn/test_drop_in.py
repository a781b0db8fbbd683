"""The wrapper takes the arguments of torch's, has its attributes, and does what they say."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from tests.nn.parallel import mean_gradients, net, parts
from tests.ranks import run_ranks
from tests.same import assert_same, gradients_of

OurDDP = lockstep.DistributedDataParallel
# torch before 2.13 has broadcast_buffers alone, which is True where it has become None since.
HAS_NEWER_NAME = "forward_sync_buffers" in inspect.signature(TorchDDP).parameters
HAS_CAPS = "bucket_cap_mb_list" in inspect.signature(TorchDDP).parameters


def launch(body: Any, world_size: int = 2) -> list[Any]:
    return lockstep.launch(body, world_size, ranks="threads")


class Counting(nn.Module):
    """Counts its forwards in a buffer, from a number that each rank has for itself."""

    def __init__(self, start: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.register_buffer("seen", torch.tensor(start))
        self.register_buffer("local", torch.tensor(start))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.layer(x)


def test_parameters_begin_with_those_of_torch_in_the_same_order() -> None:
    theirs = inspect.signature(TorchDDP).parameters
    ours = inspect.signature(OurDDP).parameters
    assert list(ours)[: len(theirs)] == list(theirs)
    for name in theirs:
        assert ours[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if name == "broadcast_buffers" and not HAS_NEWER_NAME:
            assert (ours[name].default, theirs[name].default) == (None, True)
        elif name != "gradient_as_bucket_view":  # documented: it makes no difference here
            assert ours[name].default == theirs[name].default


def test_everything_may_be_given_by_position() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        first = (None, None, 0, True, True, group, 25, True, False, True, False)
        model = OurDDP(net(), *first, None, None, None, None, False, None, False, None)
        assert model.process_group is group
        assert model.find_unused_parameters
        assert model.gradient_as_bucket_view
        model(parts(2)[rank]).square().mean().backward()
        return gradients_of(model)

    for mine in run_ranks(2, body):
        assert_same(mine, mean_gradients(net(), parts(2)))


@pytest.mark.parametrize(
    "options",
    [
        {"device_ids": []},
        {"device_ids": None, "output_device": None, "dim": 1},
        {"init_sync": False},
        {"bucket_cap_mb": 0.0001},
        {"bucket_cap_mb_list": [1, 2]},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": False},
        {"static_graph": True},
        {"skip_all_reduce_unused_params": True},
        {"skip_all_reduce_unused_params": True, "bucket_cap_mb": 0.0001},
        {"batched_grad_copy": True},
        {"lazy_bucket_allocation": True},
        {"forward_sync_buffers": False},
        {"broadcast_buffers": False},
    ],
    ids=str,
)
def test_options_that_change_no_gradient(options: dict[str, Any]) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model = OurDDP(net(), process_group=group, **options)
        for _ in range(3):
            model.zero_grad()
            model(parts(2)[rank], 1).square().mean().backward()
        assert_same(gradients_of(model), expected)

    alone = net()
    alone(parts(2).flatten(0, 1), 1).square().mean().backward()
    expected = [p.grad for p in alone.parameters()]
    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=str)
def test_gradients_can_be_detached_in_place(options: dict[str, Any]) -> None:
    """As with torch's, if it isn't asked for gradients that are views of buckets."""

    def body(world: lockstep.World) -> None:
        for wrap in (TorchDDP, OurDDP):
            model = wrap(net(), find_unused_parameters=True, **options)
            for _ in range(2):
                model(parts(2)[world.rank]).square().mean().backward()
                for gradient in (p.grad for p in model.parameters() if p.grad is not None):
                    gradient.detach_().zero_()

    launch(body)


def test_without_init_sync_every_rank_keeps_its_parameters() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> float:
        layer = nn.Linear(1, 1)
        nn.init.constant_(layer.weight, rank)
        return OurDDP(layer, process_group=group, init_sync=False).module.weight.item()

    assert run_ranks(2, body) == [0.0, 1.0]


@pytest.mark.filterwarnings("ignore:.*broadcast_buffers:FutureWarning")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"broadcast_buffers": True},
        {"broadcast_buffers": False},
        {"broadcast_buffers": False, "init_sync": False},
    ]
    + [
        {"forward_sync_buffers": True},
        {"forward_sync_buffers": False},
        {"broadcast_buffers": False, "forward_sync_buffers": True},
        {"broadcast_buffers": True, "forward_sync_buffers": False},
    ]
    * HAS_NEWER_NAME,
    ids=str,
)
def test_buffers_start_and_follow_as_torchs_do(options: dict[str, Any]) -> None:
    """``broadcast_buffers=False`` leaves them alone in the beginning, too; the newer name not."""

    def body(world: lockstep.World) -> None:
        models = [wrap(Counting(10.0 * world.rank), **options) for wrap in (OurDDP, TorchDDP)]
        ours, theirs = models
        assert ours.broadcast_buffers == theirs.broadcast_buffers
        newer_name = "forward_sync_buffers" if HAS_NEWER_NAME else "broadcast_buffers"
        assert ours.forward_sync_buffers == getattr(theirs, newer_name)
        for _ in range(2):
            assert ours.module.seen == theirs.module.seen
            assert ours.module.local == theirs.module.local
            for model in models:
                model.module.local += 1 + world.rank
                model(parts(2)[world.rank]).sum().backward()
            # torch's follow when the next forward begins, and so may they here.
            for model in models:
                model(parts(2)[world.rank]).sum().backward()

    launch(body)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check_reduction": True}, "^check_reduction is deprecated, .*: leave it out"),
        (
            {"broadcast_buffers": True, "forward_sync_buffers": False},
            "^broadcast_buffers has no effect beside forward_sync_buffers",
        ),
    ],
    ids=str,
)
def test_an_argument_without_effect_is_told_of_as_torch_tells_it(
    options: dict[str, Any], says: str
) -> None:
    with pytest.warns(FutureWarning, match=says) as told:
        OurDDP(net(), **options)
    assert [warning.filename for warning in told] == [__file__]


def test_whether_buffers_follow_can_be_set_later() -> None:
    def body(world: lockstep.World) -> None:
        model = OurDDP(Counting())
        model.broadcast_buffers = False
        assert not model.forward_sync_buffers
        for _ in range(2):
            model.module.local += 1 + world.rank
            model(parts(2)[world.rank]).sum().backward()
        assert model.module.local == 2 * (1 + world.rank)
        model.forward_sync_buffers = True
        assert model.broadcast_buffers
        for _ in range(2):
            model(parts(2)[world.rank]).sum().backward()
        assert model.module.local == 2

    launch(body)


def test_parallel_parts_keep_their_policies_when_those_of_the_wrapper_are_set() -> None:
    def body(world: lockstep.World) -> None:
        inner, outer = Counting(), Counting()
        outer.inner = lockstep.parallelize(inner, broadcast_buffers={"*": "mean"})
        model = OurDDP(outer)
        model.broadcast_buffers = False
        inner.local.fill_(world.rank)
        outer.local.fill_(world.rank)
        inputs = parts(2)[world.rank]
        (model(inputs).sum() + inner(inputs).sum()).backward()
        assert (inner.local.item(), outer.local.item()) == (0.5, world.rank)

    launch(body)


def test_attributes_are_those_of_torchs() -> None:
    names = (
        "device",
        "device_type",
        "device_ids",
        "output_device",
        "dim",
        "process_group",
        "broadcast_buffers",
        *["forward_sync_buffers"] * HAS_NEWER_NAME,
        "find_unused_parameters",
        "static_graph",
        "mixed_precision",
        "parameters_to_ignore",
        "require_backward_grad_sync",
        "bucket_bytes_cap",
        *["bucket_bytes_cap_list", "bucket_bytes_cap_default"] * HAS_CAPS,
        *["batched_grad_copy"] * HAS_NEWER_NAME,
        "skip_all_reduce_unused_params",
        "training",
    )
    of_caps = [
        {"bucket_cap_mb_list": [0.5, 2, 1]},
        {"bucket_cap_mb_list": [2], "bucket_cap_mb": 3},
        {"bucket_cap_mb_list": []},
    ]

    def body(world: lockstep.World) -> None:
        for options in (
            {},
            {"bucket_cap_mb": 3},
            {"find_unused_parameters": True},
            *of_caps * HAS_CAPS,
        ):
            inner = Counting()
            ours, theirs = OurDDP(inner, **options), TorchDDP(Counting(), **options)
            for name in names:
                assert getattr(ours, name) == getattr(theirs, name), name
            assert ours.module is inner
            assert list(ours.named_module_buffers) == list(theirs.named_module_buffers)
            buffers = list(ours.named_module_buffers.values())
            assert buffers[0] is inner.seen
            assert [id(b) for b in ours.modules_buffers] == [id(b) for b in buffers]
            assert [n for n, _ in ours.named_parameters()] == [
                n for n, _ in theirs.named_parameters()
            ]

    launch(body)


def test_buckets_have_the_caps_of_a_list() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[int]:
        inner = nn.Sequential(*(nn.Linear(4, 4, bias=False).double() for _ in range(4)))
        caps = [256 / 2**20, 1 / 2**20]  # two layers, and then one
        model = OurDDP(inner, process_group=group, bucket_cap_mb=1, bucket_cap_mb_list=caps)
        for _ in range(2):  # with the second, buckets have their final arrangement
            model(parts(2)[rank]).sum().backward()
        sizes: list[int] = model._get_ddp_logging_data()["bucket_sizes"]
        return sizes

    assert run_ranks(2, body) == [[256, 128, 128]] * 2


@pytest.mark.parametrize("size", [1, 2])
def test_require_backward_grad_sync_is_what_no_sync_sets(size: int) -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, alone = OurDDP(net(), process_group=group), net()
        x = parts(size)[rank]
        with model.no_sync():
            assert not model.require_backward_grad_sync
        assert model.require_backward_grad_sync
        model.require_backward_grad_sync = False
        assert not model.require_backward_grad_sync
        model(x).square().mean().backward()
        alone(x).square().mean().backward()
        assert_same(gradients_of(model), [p.grad for p in alone.parameters()])
        model.require_backward_grad_sync = True
        model.zero_grad()
        model(x).square().mean().backward()
        assert_same(gradients_of(model), mean_gradients(net(), parts(size)))

    run_ranks(size, body)


@pytest.mark.parametrize("more", [0, 1], ids=["same size", "other size"])
@pytest.mark.parametrize("tell", [OurDDP, TorchDDP], ids=["our way", "torch's way"])
def test_ignored_parameters_and_buffers_stay_each_ranks_own(
    tell: type[nn.Module], more: int
) -> None:
    class Sharded(Counting):
        def __init__(self, rank: int) -> None:
            super().__init__(float(rank))
            # Of another size on each rank, as shards may be.
            self.table = nn.Linear(4, 2 + more * rank).double()
            self.register_buffer("rows", torch.arange(2.0 + more * rank))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.local += 1
            return torch.cat([super().forward(x), self.table(x)], dim=1)

    def body(world: lockstep.World) -> None:
        model = Sharded(world.rank)
        weight = model.table.weight.detach().clone()
        alone = copy.deepcopy(model)
        ignored = ["table.weight", "table.bias", "local", "rows"]
        tell._set_params_and_buffers_to_ignore_for_model(model, ignored)
        model = OurDDP(model)
        assert model.parameters_to_ignore == set(ignored)
        assert set(model.named_module_buffers) == {"seen"}
        assert torch.equal(model.module.table.weight, weight)
        x = parts(2)[world.rank]
        for _ in range(2):
            model.zero_grad()
            alone.zero_grad()
            model(x).sum().backward()
            alone(x).sum().backward()
            assert torch.equal(model.module.table.weight.grad, alone.table.weight.grad)
            other = torch.empty_like(model.module.layer.weight.grad)
            other.copy_(model.module.layer.weight.grad)
            dist.all_reduce(other, op=dist.ReduceOp.MAX)
            assert torch.equal(other, model.module.layer.weight.grad)
        assert model.module.local == world.rank + 2
        assert torch.equal(model.module.rows, torch.arange(2.0 + more * world.rank))

    launch(body)


def test_a_mesh_says_which_ranks_keep_in_step() -> None:
    def body(world: lockstep.World) -> float:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, world.rank)
        model = OurDDP(layer, device_mesh=grid["replicate"])
        assert model.process_group is grid.get_group("replicate")
        model(torch.tensor([[float(world.rank)]])).sum().backward()
        assert layer.weight.item() == world.rank % 2
        everyone = OurDDP(nn.Linear(1, 1), device_mesh=init_device_mesh("cpu", (4,)))
        assert everyone.process_group.size() == 4
        with pytest.raises(RuntimeError, match="device_mesh has 2 dimensions"):
            OurDDP(nn.Linear(1, 1), device_mesh=grid)
        with pytest.raises(RuntimeError, match="not both"):
            OurDDP(layer, process_group=world.process_group, device_mesh=grid["replicate"])
        return layer.weight.grad.item()

    # 0 with 2, and 1 with 3.
    assert launch(body, 4) == [1.0, 2.0, 1.0, 2.0]


def test_delayed_parameters_get_the_mean_as_well() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        inner = net()
        model = OurDDP(
            inner,
            process_group=group,
            delay_all_reduce_named_params=[("second.weight", inner.second.weight)],
            param_to_hook_all_reduce=inner.first.weight,
        )
        for _ in range(2):
            model.zero_grad()
            model(parts(2)[rank]).square().mean().backward()
        return gradients_of(model)

    for mine in run_ranks(2, body):
        assert_same(mine, mean_gradients(net(), parts(2)))


@pytest.mark.parametrize("name", ["delay_all_reduce_named_params", "param_to_hook_all_reduce"])
def test_one_of_the_arguments_of_a_delay_is_refused(name: str) -> None:
    inner = net()
    value = inner.first.weight if name.startswith("param") else list(inner.named_parameters())
    with pytest.raises(ValueError, match="go together"):
        OurDDP(inner, **{name: value})


def test_a_static_graph_may_be_promised_later() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        model = OurDDP(net(), process_group=group)
        assert not model.static_graph
        model._set_static_graph()
        assert model.static_graph
        for _ in range(3):
            model.zero_grad()
            model(parts(2)[rank]).square().mean().backward()
        return gradients_of(model)

    for mine in run_ranks(2, body):
        assert_same(mine, mean_gradients(net(), parts(2)))


def test_without_its_hooks_gradients_are_each_ranks_own() -> None:
    def body(rank: int, group: dist.ProcessGroup) -> None:
        model, alone = OurDDP(net(), process_group=group), net()
        x = parts(2)[rank]
        model(x).square().mean().backward()
        model.zero_grad()
        model._remove_autograd_hooks()
        if rank == 0:  # alone, without the other
            model(x).square().mean().backward()
            alone(x).square().mean().backward()
            assert_same(gradients_of(model), [p.grad for p in alone.parameters()])

    run_ranks(2, body)


def test_logging_data_has_what_torchs_has_under_the_same_names() -> None:
    names = (
        "module_name",
        "world_size",
        "rank",
        "backend_name",
        "num_parameter_tensors",
        "total_parameter_size_bytes",
        "bucket_cap_bytes",
        "broadcast_buffers",
        "find_unused_parameters",
        "gradient_as_bucket_view",
        "static_graph",
        "has_sync_bn",
        "is_multi_device_module",
    )

    def body(world: lockstep.World) -> None:
        for options in (
            {"gradient_as_bucket_view": False},
            {"gradient_as_bucket_view": True, "static_graph": True},
        ):
            ours, theirs = (wrap(Counting(), **options) for wrap in (OurDDP, TorchDDP))
            for model in (ours, theirs):
                for _ in range(2):
                    model(parts(2)[world.rank]).sum().backward()
            here, there = ours._get_ddp_logging_data(), theirs._get_ddp_logging_data()
            for name in names:
                assert here[name] == there.get(name, 0), name
        for kind in (nn.SyncBatchNorm, lockstep.SyncBatchNorm):
            normed = OurDDP(nn.Sequential(nn.Linear(4, 3), kind(3)))
            assert normed._get_ddp_logging_data()["has_sync_bn"]

    launch(body)
