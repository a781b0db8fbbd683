"""The base of modules that are wrapped around another module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

from torch import nn


class _Hidden:
    """Hides a name of the base class, as if the class didn't have it."""

    def __get__(self, wrapper: object, owner: type) -> NoReturn:
        raise AttributeError(  # then Python calls __getattr__(), which asks the model
            f"torch has this name in the class that lockstep's {owner.__name__} is derived from, "
            "for a mechanism which isn't used here."
        )


def _method_of_model(method: Callable[..., None]) -> Any:
    """A method of ``nn.Module`` that is called on the model as soon as the wrapper is ready."""

    def call(wrapper: Wrapper, *args: Any, **kwargs: Any) -> None:
        if "_is_ready" in wrapper.__dict__:
            getattr(wrapper.module, method.__name__)(*args, **kwargs)
        else:
            method(wrapper, *args, **kwargs)

    return call


class Wrapper(nn.Module):
    """A module around ``self.module``, whose methods and attributes it has as well.

    A subclass sets ``_is_ready`` after all other attributes of the wrapper. Until then every
    attribute that is set is the wrapper's own, even if the model has one of that name.

    A subclass may be derived from torch's class too, only for ``isinstance``. Names of torch's
    class that the subclass neither overrides nor lists in ``inherits`` are hidden, those of later
    versions of torch included: torch's methods look for a reducer that isn't there, and would hide
    the model's methods of that name.
    """

    module: nn.Module

    def __init_subclass__(cls, inherits: Collection[str] | None = None, **kwargs: Any) -> None:
        """Hide names of torch's class, if this one is derived from it."""
        super().__init_subclass__(**kwargs)
        if inherits is None:
            return
        ours = {name for base in cls.__mro__ if issubclass(base, Wrapper) for name in vars(base)}
        for base in cls.__bases__:
            if issubclass(base, nn.Module) and not issubclass(base, Wrapper):
                for name in {*vars(base)} - ours - {*inherits}:
                    if not name.startswith("__"):
                        setattr(cls, name, _Hidden())

    def __getattr__(self, name: str) -> Any:
        """Return the model's attribute, if the wrapper has none of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Before __init__ is done (in unpickling, say) there is no model to ask.
            if name == "module":
                raise
            return getattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the model's attribute, if only the model has one of that name."""
        is_part = isinstance(value, nn.Module | nn.Parameter) and name != "module"
        if self._is_the_models(name) or (is_part and "_is_ready" in self.__dict__):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Delete the model's attribute, if only the model has one of that name."""
        if self._is_the_models(name):
            delattr(self.module, name)
        else:
            super().__delattr__(name)

    def _is_the_models(self, name: str) -> bool:
        if "_is_ready" not in self.__dict__ or name == "module":
            return False
        is_wrappers = name in self.__dict__ or hasattr(type(self), name)
        return not is_wrappers and hasattr(self.module, name)

    add_module = _method_of_model(nn.Module.add_module)
    register_parameter = _method_of_model(nn.Module.register_parameter)
    register_buffer = _method_of_model(nn.Module.register_buffer)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict as any module does; one of the bare model is accepted too."""
        if self._is_of_bare_model(state_dict, ""):
            versions = getattr(state_dict, "_metadata", {})
            state_dict = OrderedDict((f"module.{key}", value) for key, value in state_dict.items())
            state_dict._metadata = {  # type: ignore[attr-defined]
                f"module.{path}".rstrip("."): version for path, version in versions.items()
            }
        return super().load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # The same for a wrapper that is a part of another module.
        if self._is_of_bare_model(state_dict, prefix):
            bare = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
            for key, value in bare.items():
                state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = value
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _is_of_bare_model(self, state_dict: Mapping[str, Any], prefix: str) -> bool:
        keys = list(self.module.state_dict())
        num_prefixed = sum(f"{prefix}module.{key}" in state_dict for key in keys)
        return sum(prefix + key in state_dict for key in keys) > num_prefixed
