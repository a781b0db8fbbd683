"""What every module that is wrapped around another one has in common."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import nn


class _Hidden:
    """A name that a class doesn't have, although its base has it."""

    def __get__(self, wrapper: object, owner: type) -> NoReturn:
        raise AttributeError(  # on which Python asks __getattr__(), and so the model
            f"torch has this name in the class that lockstep's {owner.__name__} is derived from, "
            "for a mechanism which isn't used here."
        )


class Wrapper(nn.Module):
    """A module around ``self.module``, of which all methods and attributes are its own too.

    A subclass sets ``_is_ready`` when it has set all attributes that are the wrapper's.

    It may be derived from torch's class, for ``isinstance`` alone. What it neither overrides nor
    ``inherits`` by name is hidden, torch's internals and what later versions add: they would look
    for a reducer that isn't there, and stand before methods of the model that are called the same.
    """

    module: nn.Module

    def __init_subclass__(cls, inherits: Collection[str] = (), **kwargs: Any) -> None:
        """Hide names of torch's class."""
        super().__init_subclass__(**kwargs)
        ours = {name for base in cls.__mro__ if issubclass(base, Wrapper) for name in vars(base)}
        for base in cls.__bases__:
            if issubclass(base, nn.Module) and not issubclass(base, Wrapper):
                for name in {*vars(base)} - ours - {*inherits}:
                    if not name.startswith("__"):
                        setattr(cls, name, _Hidden())

    def __getattr__(self, name: str) -> Any:
        """What the wrapper doesn't have is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before __init__ is done (in unpickling, say) there is no model to ask.
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What the model has and the wrapper doesn't is set there."""
        is_part = isinstance(value, nn.Module | nn.Parameter) and name != "module"
        if self._is_the_models(name) or (is_part and "_is_ready" in self.__dict__):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """What the model has and the wrapper doesn't is deleted there."""
        if self._is_the_models(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_the_models(self, name: str) -> bool:
        # Until it is ready, all that is set is the wrapper's own, even if the model has it too.
        if "_is_ready" not in self.__dict__ or name == "module":
            return False
        is_own = name in self.__dict__ or hasattr(type(self), name)
        return not is_own and hasattr(self.module, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add it to the model, where its parameters are looked after."""
        if "_is_ready" in self.__dict__:
            self.module.add_module(name, module)
        else:
            super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add it to the model."""
        if "_is_ready" in self.__dict__:
            self.module.register_parameter(name, param)
        else:
            super().register_parameter(name, param)

    def register_buffer(
        self, name: str, tensor: torch.Tensor | None, persistent: bool = True
    ) -> None:
        """Add it to the model."""
        if "_is_ready" in self.__dict__:
            self.module.register_buffer(name, tensor, persistent)
        else:
            super().register_buffer(name, tensor, persistent)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As any module's; what the bare model has saved is loaded, too."""
        if self._is_of_bare_model(state_dict, ""):
            prefixed = OrderedDict((f"module.{key}", value) for key, value in state_dict.items())
            versions = getattr(state_dict, "_metadata", {})
            prefixed._metadata = {  # type: ignore[attr-defined]
                f"module.{path}" if path else "module": version
                for path, version in versions.items()
            }
            state_dict = prefixed
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """The same where the wrapper is a part of what is loaded."""
        if self._is_of_bare_model(state_dict, prefix):
            bare = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
            for key, value in bare.items():
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _is_of_bare_model(self, state_dict: Mapping[str, Any], prefix: str) -> bool:
        keys = list(self.module.state_dict())
        num_prefixed = sum(f"{prefix}module.{key}" in state_dict for key in keys)
        return sum(prefix + key in state_dict for key in keys) > num_prefixed
