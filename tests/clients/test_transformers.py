"""Transformers' Trainer, with torch's wrapper and with ours in its place."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lockstep
from tests.clients.forks import Forks
from tests.clients.gpt2 import Tokens, gpt2
from tests.clients.toy import GLOBAL_BATCH, assert_ranks_as_alone, parameters_of, place


def train_by_trainer(kind: str, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from lockstep.integrations import replace_torch_ddp

    if kind == "wrapper":
        lockstep.init()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=GLOBAL_BATCH // 2 // place()[1],
            gradient_accumulation_steps=2,
            max_steps=3,
            learning_rate=0.1,
            max_grad_norm=0.5,
            optim="sgd",
            lr_scheduler_type="constant",
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **options,
        )
        net = gpt2()
        trainer = Trainer(net, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
        if kind == "wrapper":
            with replace_torch_ddp():
                trainer.train()
            assert isinstance(
                trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=False),
                type(net),
            )
            assert dist.get_backend() == "shm"
        else:
            trainer.train()
        trainer.evaluate()
        trainer.save_model(folder)
    return parameters_of(net)


@pytest.fixture(scope="module")
def alone(forks: Forks) -> Any:
    return forks.run(train_by_trainer, 1, "alone")[0]


@pytest.mark.parametrize("kind", ["torch", "wrapper"])
def test_the_trainer_gives_what_one_process_gives(forks: Forks, alone: Any, kind: str) -> None:
    assert_ranks_as_alone(forks.run(train_by_trainer, 2, kind), alone)


def test_the_trainer_compiles(forks: Forks, alone: Any) -> None:
    how = {"torch_compile": True, "torch_compile_backend": "eager"}
    assert_ranks_as_alone(forks.run(train_by_trainer, 2, "wrapper", **how), alone)


def save_and_resume(num_ranks: int) -> Any:
    """Train two steps, save, and go on in another Trainer: with the optimizer sharded, or not."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from lockstep.integrations import replace_torch_ddp

    class Shard(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, optimizer: Any, **others: Any) -> None:
            lockstep.shard_optimizer(optimizer)

    lockstep.init()
    with tempfile.TemporaryDirectory() as local:
        folders = [local]
        if num_ranks > 1:
            dist.broadcast_object_list(folders)
        for num_steps in 2, 4:
            arguments = TrainingArguments(
                folders[0],
                use_cpu=True,
                per_device_train_batch_size=GLOBAL_BATCH // num_ranks,
                max_steps=num_steps,
                learning_rate=0.1,
                optim="adamw_torch",
                adam_epsilon=0.1,
                logging_strategy="no",
                save_steps=2,
                report_to="none",
                disable_tqdm=True,
            )
            net = gpt2()
            callbacks = [Shard()] if num_ranks > 1 else []
            trainer = Trainer(net, arguments, train_dataset=Tokens(), callbacks=callbacks)
            with replace_torch_ddp():
                trainer.train(resume_from_checkpoint=num_steps == 4)
        saved = torch.load(f"{folders[0]}/checkpoint-4/optimizer.pt")["state"]
        if num_ranks > 1:
            dist.barrier()
    return parameters_of(net), {key: entry["exp_avg"].norm().item() for key, entry in saved.items()}


def test_the_trainer_saves_a_sharded_optimizer(forks: Forks) -> None:
    ((expected, state),) = forks.run(save_and_resume, 1, 1)
    for found, saved in forks.run(save_and_resume, 2, 2):
        assert saved == pytest.approx(state)
        assert_ranks_as_alone([found], expected)
