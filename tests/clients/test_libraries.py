"""What leaves the loop to its user: PEFT, torchmetrics, ignite, torch_geometric, timm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from tests.clients.forks import Forks
from tests.clients.gpt2 import Tokens, gpt2
from tests.clients.torchvision import stand_in_for_torchvision
from tests.clients.toy import (
    PARALLEL,
    Kind,
    Net,
    assert_ranks_as_alone,
    dataset,
    loader,
    make_group,
    parameters_of,
    place,
    wrap,
)


def adapt(kind: Kind) -> Any:
    """LoRA on a frozen model, with gradient checkpoints."""
    from peft import LoraConfig, get_peft_model

    make_group(kind)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.0)
    net = get_peft_model(gpt2(), config).double()
    net.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    model = wrap(kind, net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 1.0)
    for batch in loader(Tokens()):
        logits = model(input_ids=batch["input_ids"]).logits
        F.cross_entropy(logits.transpose(1, 2), batch["input_ids"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in net.named_parameters() if "lora" in name}


def measure(kind: Kind) -> Any:
    """Metrics over ranks with different numbers of samples, in the model and outside of it."""
    from torchmetrics.aggregation import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

    class Measured(Net):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = MulticlassAccuracy(3, average="micro")

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.accuracy.update(out.detach(), y)
            return F.cross_entropy(out, y)

    make_group(kind)
    net = Measured().double()
    model = wrap(kind, net)
    curve, mean = MulticlassAUROC(3), MeanMetric()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for x, y in loader(dataset()):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    x, y = dataset().tensors
    mine = slice(None) if kind == "alone" else (slice(0, 30), slice(30, None))[place()[0]]
    with torch.no_grad():
        out = net.outer(net.inner(x[mine]))
        curve.update(out.float(), y[mine])
        mean.update(F.cross_entropy(out, y[mine], reduction="none").float())
    measured = [net.accuracy.compute(), curve.compute(), mean.compute()]
    # torchmetrics counts in float32.
    return parameters_of(net), [round(float(value), 5) for value in measured]


def measure_over_ours(kind: Kind) -> Any:
    """Metrics that synchronise by our function; the last rank has no data for three of them."""
    from torchmetrics.aggregation import CatMetric, MaxMetric, MeanMetric
    from torchmetrics.classification import MulticlassAUROC, MulticlassConfusionMatrix
    from torchmetrics.regression import R2Score

    from lockstep.integrations import gather_all_tensors

    make_group(kind)
    # Over Gloo too, where a rank without data ends the process if torchmetrics synchronises.
    ours = {"dist_sync_fn": gather_all_tensors}
    curve, matrix = MulticlassAUROC(3, **ours), MulticlassConfusionMatrix(3, **ours)
    every, largest, mean = CatMetric(**ours), MaxMetric(**ours), MeanMetric(**ours)
    fit = R2Score(**ours)  # whose sums are float64 where there is data, and float32 elsewhere
    x, y = dataset().tensors
    rank, size = place()
    mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
    matrix.update(x[mine, :3], y[mine])
    largest.update(x[mine])
    mean.update(x[mine, 0].float())
    if rank == 0:
        curve.update(x[:30, :3].float(), y[:30])
        every.update(x[:30, 0].float())
        fit.update(x[:30, 0], x[:30, 1])
    parts = [curve.compute(), matrix.compute().double(), every.compute(), largest.compute()]
    parts.append(fit.compute())
    return [part.double() for part in parts], round(float(mean.compute()), 5)


def run_engine(kind: Kind) -> Any:
    """ignite's Engine, its distributed helpers, and metrics."""
    import ignite.distributed as idist
    from ignite.engine import Engine, Events
    from ignite.metrics import Accuracy, RunningAverage

    make_group(kind)
    net = Net().double()
    # Its auto_model() knows the backends by name, and wraps nothing over another one.
    model = idist.auto_model(net) if kind == "torch" else wrap(kind, net)
    optimizer = idist.auto_optim(torch.optim.SGD(net.parameters(), 0.1))

    def step(engine: Engine, batch: Any) -> Any:
        optimizer.zero_grad()
        out = model(batch[0])
        loss = F.cross_entropy(out, batch[1])
        loss.backward()
        optimizer.step()
        return {"loss": loss.item(), "y_pred": out.detach(), "y": batch[1]}

    trainer = Engine(step)
    RunningAverage(output_transform=lambda output: output["loss"]).attach(trainer, "loss")
    Accuracy(output_transform=lambda output: (output["y_pred"], output["y"])).attach(trainer, "a")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _: idist.barrier())
    trainer.run(loader(dataset()), max_epochs=2)
    assert idist.get_world_size() == place()[1]
    return parameters_of(net), trainer.state.metrics["a"]


def learn_graphs(kind: Kind) -> Any:
    """Graphs of different sizes, with a loss of each node: exact through lockstep.mean()."""
    from torch_geometric.data import Batch, Data
    from torch_geometric.nn import GCNConv, global_mean_pool

    class Graphs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(place()[0])
            self.conv, self.head = GCNConv(4, 8), nn.Linear(8, 2)

        def forward(self, data: Any) -> torch.Tensor:
            hidden = torch.tanh(self.conv(data.x, data.edge_index))
            return self.head(global_mean_pool(hidden, data.batch)), self.head(hidden)

    generator = torch.Generator().manual_seed(1)
    graphs = []
    for index in range(16):
        size = 3 + index % 5
        edges = torch.randint(size, (2, 2 * size), generator=generator)
        x = torch.randn(size, 4, generator=generator, dtype=torch.float64)
        graphs.append(Data(x=x, edge_index=edges, y=torch.randint(2, (1,), generator=generator)))
    make_group(kind)
    net = Graphs().double()
    model = wrap(kind, net)
    optimizer = torch.optim.SGD(net.parameters(), 0.5)
    rank, size = place()
    for start in range(0, len(graphs), 8):
        data = Batch.from_data_list(graphs[start + rank : start + 8 : size])
        of_graphs, of_nodes = model(data)
        loss = F.cross_entropy(of_graphs, data.y)
        if kind != "torch":  # whose mean of means isn't the mean over all nodes
            loss = loss + lockstep.mean(of_nodes.pow(2).mean(1))
        else:
            num_nodes = torch.tensor(float(len(of_nodes)), dtype=torch.float64)
            torch.distributed.all_reduce(num_nodes)
            loss = loss + size * of_nodes.pow(2).mean(1).sum() / num_nodes
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_of(net)


def learn_images(kind: Kind) -> Any:
    """timm's vision transformer, its average of the weights, and its way to unwrap a model."""
    stand_in_for_torchvision()
    import timm
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3, distribute_bn, unwrap_model

    make_group(kind)
    torch.manual_seed(place()[0])
    net = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2, num_classes=3
    ).double()
    average = ModelEmaV3(net, decay=0.5)
    model = wrap(kind, net)
    average.set(net)
    assert unwrap_model(model) is net
    optimizer = create_optimizer_v2(net, opt="sgd", lr=0.1, weight_decay=0.1)
    x, y = dataset().tensors
    images = torch.nn.functional.interpolate(x.reshape(-1, 1, 2, 3), (32, 32)).expand(-1, 3, -1, -1)
    for images_, y_ in loader(torch.utils.data.TensorDataset(images, y)):
        F.cross_entropy(model(images_), y_).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update(net)
    distribute_bn(model, place()[1], reduce=True)
    return parameters_of(net), parameters_of(average.module)


TASKS = [adapt, measure, measure_over_ours, run_engine, learn_graphs, learn_images]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_library_gives_what_one_process_gives(forks: Forks, task: Any) -> None:
    (alone,) = forks.run(task, 1, "alone")
    for kind in PARALLEL:
        assert_ranks_as_alone(forks.run(task, 2, kind), alone)


def test_tensorboard_reads_what_is_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lockstep.log_to(tmp_path, lines=False)
    for step in range(3):
        lockstep.log(loss=step / 2, step=step)
    lockstep.log_to()
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [(each.step, each.value) for each in found.Scalars("loss")] == [(0, 0), (1, 0.5), (2, 1)]


def test_batches_of_attrs_and_of_tokenizers_are_divided_and_joined() -> None:
    import attrs
    from transformers import BatchEncoding
    from transformers.modeling_outputs import CausalLMOutput

    @attrs.define
    class Rows:
        x: Any
        twice: Any = attrs.field(init=False)

        def __attrs_post_init__(self) -> None:
            self.twice = 2 * self.x

    @attrs.frozen
    class Frozen:
        _x: Any
        x = property(lambda self: self._x)

    x = torch.arange(12.0).view(6, 2)
    for whole in (Rows(x), Frozen(x), BatchEncoding({"x": x}), CausalLMOutput(logits=x)):
        name = "logits" if isinstance(whole, CausalLMOutput) else "x"
        parts = lockstep.scatter(whole, ["cpu"] * 3)
        joined = lockstep.gather(parts, "cpu")
        assert [type(part) for part in (*parts, joined)] == [type(whole)] * 4
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), x)
        assert torch.equal(getattr(joined, name), x)
        if isinstance(whole, Rows):
            assert torch.equal(torch.cat([part.twice for part in parts]), 2 * x)
            assert torch.equal(joined.twice, 2 * x)
