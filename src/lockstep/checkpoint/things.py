"""Models, optimizers and other things: what of them is saved, and how they get it back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.folder import Manifest, excerpt
from lockstep.errors import CheckpointMismatch
from lockstep.nn import TORCHS_WRAPPERS, DataParallel
from lockstep.optim import LocalState, has_more_state, inner_optimizer, sharding_of
from lockstep.same_bits import continue_steps, steps_of
from lockstep.tree import Collector, TensorName, check_tensor, decode, header_of
from lockstep.world import parameters_of

# What torch's schedulers add to an optimizer's groups.
_OF_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
# Puts into a thing what was saved of it, or returns it.
Action = Callable[[], object]


class OfRank:
    """Values by name that are one rank's own: it alone gets them back, of as many ranks.

    Of another number of ranks, all get those of rank 0.

    Args:
        rank: The rank.
        size: The number of ranks.
        values: What is saved; of no use for loading, which returns what was saved.
    """

    def __init__(self, rank: int, size: int, values: Mapping[str, Any]) -> None:
        self.rank, self.size, self.values = rank, size, values

    def encode(self, name: str, local: Collector) -> dict[str, Any]:
        """Return it as a thing that is divided by rank."""
        path = f"{name}.{self.rank}"
        pairs = [[key, local.encode(each, f"{path}.{key}")] for key, each in self.values.items()]
        return {"kind": "value", "tree": None, "divided": {str(self.rank): pairs}}

    def read(self, name: str, manifest: Manifest) -> dict[str, Any]:
        """Return this rank's values."""
        rank = self.rank if manifest.facts["ranks"] == self.size else 0

        def values() -> dict[str, Any]:
            pairs = manifest.facts["divided"][name][str(rank)]
            return {str(key): decode(each, manifest.read) for key, each in pairs}

        found: dict[str, Any] = manifest.parse(values)
        return found


def kind_of(thing: object) -> str:
    """Return how a thing is saved; ``"value"`` as it is."""
    if isinstance(thing, type):  # whose methods lack their object
        return "value"
    if isinstance(thing, nn.Module):
        return "module"
    if isinstance(thing, Optimizer):
        return "state" if has_more_state(unwrapped(thing)) else "optimizer"
    if isinstance(thing, torch.Tensor):
        return "tensor"
    if isinstance(thing, torch.Generator):
        return "generator"
    if callable(getattr(thing, "state_dict", None)) and hasattr(thing, "load_state_dict"):
        return "state"
    return "value"


def encode(
    name: str, thing: Any, shared: Collector, local: Collector, *, for_this_rank: bool = False
) -> dict[str, Any]:
    """Return a thing as JSON keeps it, and what is divided of it by itself.

    Every rank calls it, for the same thing; it may block.

    Args:
        name: Its name.
        thing: The thing.
        shared: Collects what all ranks have.
        local: Collects what this rank alone has.
        for_this_rank: Whether the same rank gets it back: then it has all that this rank needs.
    """
    if isinstance(thing, OfRank):
        return thing.encode(name, local)
    kind, thing = kind_of(thing), unwrapped(thing)
    value, divided = thing, dict[str, Any]()
    if kind == "module":
        names = _plain_names(thing)
        value = {names[key]: each for key, each in thing.state_dict().items()}
    elif kind == "optimizer":
        value, divided = _encode_optimizer(name, thing, local, for_this_rank=for_this_rank)
    elif kind == "generator":
        value = thing.get_state()
    elif kind == "state":
        value = thing.state_dict()
    found = {"kind": kind, "tree": shared.encode(value, name), "divided": divided}
    if kind == "module" and (steps := steps_of(thing)) is not None:
        found["steps_in_shards"] = steps
    return found


def _encode_optimizer(
    name: str, optimizer: Optimizer, local: Collector, *, for_this_rank: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dict without what is divided among the ranks, and that of this rank."""
    parameters, sharding = parameters_of(optimizer), sharding_of(optimizer)
    if sharding is None:
        state, parts = optimizer.state_dict(), list[LocalState]()
    else:
        state, parts = sharding.local_state_dict(on_all_hosts=for_this_rank)
    divided: dict[str, list[Any]] = {}
    index_of = {parameter: index for index, parameter in enumerate(parameters)}
    for parameter, start, by_element, once in parts:
        index = index_of[parameter]
        path = f"{name}.state.{index}"
        pairs = divided.setdefault(str(index), [])  # as names may be numbers
        for key, elements in by_element.items():
            local.add_range(f"{path}.{key}", parameter, start, elements)
            pairs.append([local.encode(key, path), {"tensor": f"{path}.{key}"}])
        if start == 0 or for_this_rank:  # this rank has the first element
            # Copies: several parameters of this rank have one step count, and other ranks may
            # save that of the first one.
            pairs += [
                [
                    local.encode(key, path),
                    local.encode(v if for_this_rank else deepcopy(v), f"{path}.{key}"),
                ]
                for key, v in once.items()
            ]
    return {"shapes": [[*parameter.shape] for parameter in parameters], **state}, divided


def saved_thing(name: str, manifest: Manifest) -> dict[str, Any]:
    """Return the kind of a thing, and the tree of its value.

    Raises:
        CheckpointDamaged: If it can't be read.
    """

    def read() -> dict[str, Any]:
        found = manifest.facts["things"][name]
        return {"kind": found["kind"], "tree": found["tree"], **found}

    found: dict[str, Any] = manifest.parse(read)
    return found


def prepare(
    name: str, thing: Any, manifest: Manifest, names: Mapping[int, str], *, strict: bool
) -> Action:
    """Read what was saved of a thing, and return what puts it there; nothing is changed yet.

    Args:
        name: Its name.
        thing: The thing, or any value to have it returned as it was saved.
        manifest: The checkpoint.
        names: Names of parameters, by their id().
        strict: Whether a model has to have the parameters and buffers that were saved.

    Raises:
        CheckpointDamaged: If a file isn't as it was written.
        CheckpointMismatch: If the thing is another one.
    """
    things = manifest.facts["things"]
    if name not in things:
        raise CheckpointMismatch(
            f"There is no {name!r} in {manifest.folder}, which has {manifest.some_names()}. Load "
            "what is there."
        )
    if isinstance(thing, OfRank):
        of_rank = thing.read(name, manifest)
        return lambda: of_rank
    kind, thing = kind_of(thing), unwrapped(thing)
    saved = saved_thing(name, manifest)
    saved_kind, tree = saved["kind"], saved["tree"]
    if kind not in ("value", saved_kind):
        raise CheckpointMismatch(
            f"{name!r} was saved as a {saved_kind}, and is to be loaded into a {kind} "
            f"({type(thing).__name__}). Give what was saved, or None to get it returned."
        )
    if kind == "module":
        _check_module(name, thing, manifest, tree, strict=strict)
    if kind == "tensor":
        check_tensor(thing, name)
        _check_same(name, thing, manifest, tree)
    cache: dict[str, torch.Tensor] = {}

    def tensor_of(key: str) -> torch.Tensor:
        if key not in cache:
            cache[key] = manifest.read(key)
        return cache[key]

    put = partial(_put, name, manifest)
    if kind == "optimizer":
        _check_optimizer(name, thing, manifest, names)
        return partial(put, thing.load_state_dict, _read_optimizer(name, thing, manifest))
    if saved_kind == "optimizer":
        value = _read_optimizer(name, None, manifest)
    else:
        value = manifest.parse(decode, tree, tensor_of)
    if kind == "module":
        state = thing.state_dict()
        names_in = _plain_names(thing)
        state.update({key: value[plain] for key, plain in names_in.items() if plain in value})
        steps = saved.get("steps_in_shards")
        return partial(put, partial(_load_module, thing, steps), state)
    if kind == "tensor":
        return partial(_copy, thing, value)
    if kind == "generator":
        # So that a state that isn't one is noticed before anything is changed.
        manifest.parse(torch.Generator(device=thing.device).set_state, value)
        return partial(thing.set_state, value)
    if kind == "state":
        return partial(thing.load_state_dict, value)
    return lambda: value


def _put(name: str, manifest: Manifest, load: Callable[[Any], object], state: Any) -> None:
    """Load what a module or optimizer alone can verify: whether its state is one of its class."""
    try:
        load(state)
    except Exception as error:
        raise CheckpointMismatch(
            f"{name!r} can't be what it was in the checkpoint {manifest.folder}: "
            f"{type(error).__name__}: {excerpt(error)}. It and other things may be changed in "
            "part: make them anew, and load an older checkpoint."
        ) from error


def _load_module(module: nn.Module, steps: dict[str, Any] | None, state: Any) -> None:
    module.load_state_dict(state)
    if steps is not None:
        continue_steps(module, steps)


def _copy(target: torch.Tensor, value: Any) -> None:
    with torch.no_grad():
        target.copy_(value)


def _check_same(name: str, tensor: torch.Tensor, manifest: Manifest, tree: Any) -> None:
    """Raise CheckpointMismatch unless ``tensor`` has the shape and dtype that were saved."""
    saved = manifest.parse(lambda: manifest.entries[tree["tensor"]].header)
    if not nn.parameter.is_lazy(tensor) and saved.shape != tuple(tensor.shape):
        raise CheckpointMismatch(
            f"{name!r} has shape {list(saved.shape)} in the checkpoint {manifest.folder}, and "
            f"{list(tensor.shape)} here. Nothing was loaded: build the model that was saved."
        )
    if saved.torch_dtype is not tensor.dtype:
        raise CheckpointMismatch(
            f"{name!r} is torch.{saved.dtype} in the checkpoint {manifest.folder}, and "
            f"{tensor.dtype} here. Nothing was loaded: load into a model of that dtype, and "
            "convert it afterwards."
        )


def _check_module(
    name: str, module: nn.Module, manifest: Manifest, tree: Any, *, strict: bool
) -> None:
    names, state = _plain_names(module), module.state_dict()
    tensors = {names[key]: value for key, value in state.items()}
    saved = manifest.parse(lambda: dict(tree["dict"]))
    for what, only in (
        ("is in the checkpoint and not in the model", saved.keys() - tensors.keys()),
        ("is in the model and not in the checkpoint", tensors.keys() - saved.keys()),
    ):
        if only and strict:
            more = f" ({len(only)} in all)" if len(only) > 1 else ""
            raise CheckpointMismatch(
                f"{name}.{excerpt(min(only))}{more} {what}: {manifest.folder}. Nothing was "
                "loaded: build "
                "the model that was saved, or pass strict=False."
            )
    for key in saved.keys() & tensors.keys():
        if isinstance(tensors[key], torch.Tensor):
            _check_same(f"{name}.{key}", tensors[key], manifest, saved[key])


def _check_optimizer(
    name: str, optimizer: Optimizer, manifest: Manifest, names: Mapping[int, str]
) -> None:
    """Raise CheckpointMismatch unless the checkpoint's has parameters like the optimizer's."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    others, options, shapes = manifest.parse(_saved_groups, saved_thing(name, manifest)["tree"])
    if unlike := _foreign_options(optimizer, options):
        raise CheckpointMismatch(
            f"{name!r} in {manifest.folder} is of another class of optimizers: its options are "
            f"{excerpt(unlike)}, which {type(optimizer).__name__} doesn't have. Nothing was "
            "loaded: make the optimizer that was saved."
        )
    if sizes != others:
        raise CheckpointMismatch(
            f"{name!r} was saved with {others} parameters in its groups, and has {sizes}. "
            "Nothing was loaded: make the optimizer that was saved."
        )
    for index, (parameter, shape) in enumerate(zip(parameters_of(optimizer), shapes, strict=True)):
        if [*parameter.shape] != shape:
            called = names.get(id(parameter), f"parameter {index}")
            raise CheckpointMismatch(
                f"{name!r}: {called} has shape {shape} in the checkpoint {manifest.folder}, and "
                f"{[*parameter.shape]} here. Nothing was loaded: build the model that was saved."
            )


def _saved_groups(tree: Any) -> tuple[list[int], list[dict[str, Any]], list[list[int]]]:
    """Return the groups' numbers of parameters, their options, and all parameters' shapes."""
    groups, shapes = tree["dict"]["param_groups"], tree["dict"]["shapes"]
    sizes = [len(group["dict"]["params"]) for group in groups]
    if sum(sizes) != len(shapes):
        raise ValueError(f"{sum(sizes)} parameters have {len(shapes)} shapes")
    return sizes, decode(groups, TensorName), [[*map(int, shape)] for shape in shapes]


def _foreign_options(optimizer: Optimizer, saved: list[dict[str, Any]]) -> str:
    """Return the saved options that an optimizer lacks, if it needs others that weren't saved.

    Only both together show another class: a newer torch adds options, schedulers add some too.
    """
    for group, theirs in zip(optimizer.param_groups, saved, strict=False):
        unknown = theirs.keys() - group.keys() - _OF_SCHEDULERS
        if unknown and optimizer.defaults.keys() - theirs.keys():
            return ", ".join(sorted(unknown))
    return ""


def _read_optimizer(name: str, optimizer: Optimizer | None, manifest: Manifest) -> dict[str, Any]:
    """Return a state dict in which are at least those elements that this rank updates."""
    parameters = [] if optimizer is None else parameters_of(optimizer)
    sharding = None if optimizer is None else sharding_of(optimizer)
    owned = {} if sharding is None else sharding.owned()

    def read(index: int, key: str) -> torch.Tensor:
        header = manifest.entries[key].header
        parameter = parameters[index] if parameters else None
        if (
            parameter is None
            or parameter not in owned
            or header.order != header_of(parameter).order
        ):
            return manifest.read(key)
        return manifest.read(key, [owned[parameter]] if header.shape == parameter.shape else None)

    def state_of() -> dict[str, Any]:
        thing = manifest.facts["things"][name]
        state = {**thing["tree"]["dict"]}
        pairs = [*state.pop("state").get("pairs", [])]
        for index, each in manifest.facts["divided"][name].items():
            # Earlier versions wrote a dictionary, whose names are strings.
            pairs.append([int(index), {"dict" if isinstance(each, dict) else "pairs": each}])
        del state["shapes"]
        each = {i: decode(tree, partial(read, i)) for i, tree in sorted(pairs)}
        return {"state": each, **decode({"dict": state}, manifest.read)}

    found: dict[str, Any] = manifest.parse(state_of)
    return found


def names_of(things: Mapping[str, Any]) -> dict[int, str]:
    """Return by id() how parameters are named in the modules among ``things``."""
    modules = {n: unwrapped(t) for n, t in things.items() if isinstance(t, nn.Module)}
    return {id(p): f"{n}.{k}" for n, m in modules.items() for k, p in m.named_parameters()}


def unwrapped(thing: Any) -> Any:
    """Return the module or optimizer itself that is in a wrapper."""
    while isinstance(thing, nn.Module):
        inner = getattr(thing, "_orig_mod", None)  # of torch.compile
        if inner is None and isinstance(thing, TORCHS_WRAPPERS):
            inner = thing.module
        if inner is None:
            return thing
        thing = inner
    if hasattr(thing, "consolidate_state_dict"):
        return thing.optim  # of a ZeroRedundancyOptimizer, whose import takes a while
    return inner_optimizer(thing) if isinstance(thing, Optimizer) else thing


def _plain_names(module: nn.Module) -> dict[str, str]:
    """Return, by key of the state dict, the key that it has where no part is wrapped."""
    paths = [
        path
        for path, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, TORCHS_WRAPPERS) and not isinstance(part, DataParallel)
    ]
    # Inner wrappers first: their paths have the names of those around them.
    paths.sort(key=len, reverse=True)
    names = {}
    for key in module.state_dict():
        names[key] = key
        for path in paths:
            if names[key].startswith(f"{path}.module."):
                names[key] = f"{path}.{names[key].removeprefix(f'{path}.module.')}"
    return names
