"""Optimizers of torch and other packages: each in the bits of one process, or refused, and why."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.clients.forks import Forks
from tests.clients.optimizers import MODULES, Ending, endings_of

_PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"
# What the table says for reasons, by what they have in them.
_WHY = {
    r"group\[.*would differ": "an option of the group that would differ",
    r"its .*would differ": "an attribute that would differ",
    "it draws random numbers": "random numbers",
    "other values than with all": "other values with a part of the parameters",
    "with a part of the parameters it raises": "an error with a part of the parameters",
    "ranks can't send each other its state": "state that ranks can't send each other",
    "may call": "steps that it divides itself",
    "uses the state and can't be tried": "a method that can't be tried",
    "it can't be tried: its step raises": "steps that can't be tried",
    "it drops gradients": "gradients that are dropped in each step",
    "has an optimizer in it": "an optimizer in it, which is to be sharded",
    "calls its closure several times": "a closure that is called after a change of the parameters",
    "it differentiates gradients": "gradients of gradients, which means over ranks don't have",
    "LBFGS": "all parameters in each update",
}
# The reasons of some whose code was read.
_READ = {
    ("torch", "LBFGS"): "the update of each parameter from all of them",
    ("timm", "Lamb"): "to other values than with all",  # clips by a norm over all
    ("timm", "Lookahead"): r"shard_optimizer\(optimizer\._base_optimizer\)",
    ("timm", "Adahessian"): "differentiates gradients",
    ("pytorch_optimizer", "Prodigy"): r"group\['d'\]",
    ("pytorch_optimizer", "AdaHessian"): "differentiates gradients",
    ("pytorch_optimizer", "SophiaH"): "differentiates gradients",
    ("pytorch_optimizer", "Kron"): "draws random numbers",
    ("pytorch_optimizer", "Gravity"): "draws random numbers",
    ("pytorch_optimizer", "DistributedMuon"): r"may call all_gather\(\)",
    ("pytorch_optimizer", "SAM"): r"shard_optimizer\(optimizer\.base_optimizer\)",
    ("pytorch_optimizer", "ScalableShampoo"): "'state.pre_conditioner' is a PreConditioner",
    ("prodigyopt", "Prodigy"): r"group\['d'\]",
    ("dadaptation", "DAdaptAdam"): r"group\['d'\]",
    ("dadaptation", "DAdaptSGD"): r"group\['g0_norm'\]",
    ("schedulefree", "SGDScheduleFreeClosure"): "its closure several times",
    ("heavyball", "Muon"): "draws random numbers",
    ("heavyball", "PSGDKron"): "draws random numbers",
    ("heavyball", "SFAdamW"): r"group\['weight_sum'\]",
    ("prodigy-plus-schedule-free", "ProdigyPlusScheduleFree"): r"group\['d'\]",
}
# Those that aren't trained here, and why.
_NOT_RUN = {
    ("torch", "SparseAdam"): "takes sparse gradients alone, which aren't divided",
    ("pytorch_optimizer", "AdaLOMO"): "takes no steps, but updates in the backward",
    ("pytorch_optimizer", "BSAM"): "fails if a parameter has no gradient",
    ("pytorch_optimizer", "DeMo"): "needs another package, einops",
    ("pytorch_optimizer", "GSAM"): "takes the output of its model and the labels",
    ("pytorch_optimizer", "LOMO"): "takes no steps, but updates in the backward",
    ("pytorch_optimizer", "LoRARite"): "needs the pairs of factors of LoRA",
    ("heavyball", "PSGDBase"): "is the base of others",
    ("heavyball", "SOAPBase"): "is the base of others",
    ("prodigy-plus-schedule-free", "CoreOptimiser"): "is the base of others",
}
# Names of classes that are run at once, where all take too long for that.
_PARTS = {"pytorch_optimizer": ["[A-C].*", "[D-O].*", "[P-Z].*"]}


@pytest.mark.parametrize("package", MODULES)
def test_each_optimizer_has_the_bits_of_one_process_or_says_why_not(
    forks: Forks, package: str
) -> None:
    ranks: list[dict[str, list[Ending]]] = [{}, {}]
    for names in _PARTS.get(package, [".*"]):
        for every, part in zip(ranks, forks.run(endings_of, 2, package, names), strict=True):
            every.update(part)
    found = ranks[0]
    wrong = [
        f"{name} on rank {rank}, {options}: {ending.reason}"
        for rank, every in enumerate(ranks)
        for name, endings in every.items()
        for options, ending in zip(("by default", "with options"), endings, strict=False)
        if ending.outcome == "wrong"
    ]
    assert not wrong, "\n".join(wrong)
    for name, endings in found.items():
        assert [each.outcome for each in endings] == [each.outcome for each in ranks[1][name]]
    not_run = {name for name, endings in found.items() if endings[0].outcome == "not run"}
    assert not_run == {name for where, name in _NOT_RUN if where == package}
    for (where, name), reason in _READ.items():
        if where == package:
            assert re.search(reason, found[name][0].reason), found[name]
    row = _row(package, {name: endings[0] for name, endings in found.items()})
    assert row in _PAGE.read_text(), f"The row in {_PAGE} has to be:\n{row}"


def _row(package: str, endings: dict[str, Ending]) -> str:
    """Return the row of the table in docs/trainers.md."""
    short = ".".join(version(package).split(".")[:2])
    num_divided = sum(each.outcome == "divided" for each in endings.values())
    not_run = {name: _NOT_RUN[package, name] for name in endings if (package, name) in _NOT_RUN}
    cells = [
        f"{package} {short}",
        f"{num_divided} others" if num_divided else "",
        *("; ".join(_by_reason(_whys(endings, each))) for each in ("undivided", "refused")),
        "; ".join(_by_reason(not_run)),
    ]
    return f"| {' | '.join(cells)} |".replace("|  |", "| |").replace("|  |", "| |")


def _whys(endings: dict[str, Ending], outcome: str) -> dict[str, str]:
    """Return the reason that the table has for each optimizer that ended with ``outcome``."""
    return {name: _why(end.reason) for name, end in endings.items() if end.outcome == outcome}


def _why(reason: str) -> str:
    found = [why for text, why in _WHY.items() if re.search(text, reason)]
    assert found, f"The table has no words for: {reason}"
    return found[0]


def _by_reason(reasons: dict[str, str]) -> Iterator[str]:
    for reason in sorted({*reasons.values()}):
        names = sorted(name for name, why in reasons.items() if why == reason)
        yield f"{', '.join(names)}: {reason}"
