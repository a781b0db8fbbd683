"""Replicas in this process: kept from call to call, and brought only what has changed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from lockstep.nn.replicas.part import Arguments, Part
from lockstep.nn.replicas.tables import leaf_as_table, tables_in
from lockstep.nn.replicas.twins import (
    Twin,
    check_home,
    trained_and_buffers,
    version_of,
    versions_of,
)


class LocalReplicas:
    """Replicas of a module, in the process where that is.

    Note [Leaves]: a replica's parameters are leaves of its own graph. On the device of a parameter
    its leaf shares memory and version with it: what is written to one is written to both, and
    autograd notices what it would have noticed without replicas. Inputs are not shared so: those
    of all replicas are views of one tensor, with one version, and autograd would take what one
    replica does to its own in place for a change of the others'.

    Args:
        devices: Where they are; on the first is the module, too.
        owns_buffers: Whether the first has the module's own buffers, so that what it does to them
            stays. Otherwise it has copies as the others do, and what it saves for its backward
            isn't written to when the module gets the mean of them.
    """

    def __init__(self, devices: Sequence[torch.device], *, owns_buffers: bool) -> None:
        self._devices, self._owns_buffers = devices, owns_buffers
        self._replicas: list[_Replica] = []

    def parts(
        self, module: nn.Module, method: str, arguments: Sequence[Arguments]
    ) -> tuple[list[torch.Tensor], list[Part]]:
        """The module's parameters, and a call of that method of as many replicas of it, as it is.

        Raises:
            RuntimeError: If a parameter or buffer isn't on the first device.
        """
        parts = list(module.modules())
        if not self._replicas or not self._replicas[0].is_of(parts):
            self._replicas = [
                _Replica(module, device, owns_buffers=self._owns_buffers and number == 0)
                for number, device in enumerate(self._devices)
            ]
        parameters, buffers = trained_and_buffers(parts)
        check_home([*parameters, *buffers], self._devices[0])
        versions, tables = versions_of(buffers, parts), tables_in(parts)
        called = self._replicas[: len(arguments)]
        for replica in called:
            replica.take_after(parameters, buffers, versions, tables)
        return parameters, [
            Part(replica.device, replica.leaves, getattr(replica.module, method), own)
            for replica, own in zip(called, arguments, strict=True)
        ]

    def copies_of(self, buffer: torch.Tensor, count: int) -> list[torch.Tensor]:
        """What stands for a buffer of the module in ``count`` replicas, none of which owns it."""
        return [replica.copies[id(buffer)].tensor for replica in self._replicas[:count]]


class _Replica:
    """One replica: a twin of the module, and what stands in it for the module's tensors.

    Attributes:
        device: Where it is.
        module: The replica.
        leaves: What stands for each of the module's parameters, in their order.
        copies: What stands for each of its buffers, by the ``id()`` of that, unless it has them.
    """

    def __init__(self, original: nn.Module, device: torch.device, *, owns_buffers: bool) -> None:
        self.device = device
        self.leaves: list[torch.Tensor] = []
        self._twin = Twin(original)
        self.module = self._twin.module
        self._owns_buffers = owns_buffers
        self._leaves: dict[int, _Leaf] = {}
        self.copies: dict[int, _Copy] = {}

    def is_of(self, parts: Sequence[nn.Module]) -> bool:
        """Whether the module consists of the same parts still."""
        return self._twin.is_twin_of(parts)

    def take_after(
        self,
        parameters: Sequence[torch.Tensor],
        buffers: Sequence[torch.Tensor],
        versions: Sequence[object],
        tables: Collection[int],
    ) -> None:
        """Be what the module is now.

        Args:
            parameters: The module's.
            buffers: The module's.
            versions: What is another one if a buffer has changed.
            tables: The ``id()`` of those parameters that replicas look up together.
        """
        leaves, self._leaves = self._leaves, {}
        for parameter in parameters:
            leaf = leaves.get(id(parameter))
            if leaf is None or not leaf.is_still_that_of(parameter):
                leaf = _Leaf(parameter, self.device, is_table=id(parameter) in tables)
            self._leaves[id(parameter)] = leaf
        copies, self.copies = self.copies, {}
        for buffer, version in (
            zip(buffers, versions, strict=True) if not self._owns_buffers else ()
        ):
            copied = copies.get(id(buffer))
            if copied is None or not copied.is_still_that_of(buffer, version):
                copied = _Copy(buffer, version, self.device)
            self.copies[id(buffer)] = copied
        self.leaves = [leaf.tensor for leaf in self._leaves.values()]
        tensors = {key: leaf.tensor for key, leaf in self._leaves.items()}
        tensors |= {key: copied.tensor for key, copied in self.copies.items()}
        self._twin.take_after(tensors)


class _Copy:
    """A copy of a buffer, for a replica to write to: another one each time either has changed.

    What is overwritten may be needed for a backward that is still to come.

    Attributes:
        tensor: It.
    """

    def __init__(self, original: torch.Tensor, version: object, device: torch.device) -> None:
        # Its id() is what it is found by, and so must not become another's.
        self._original = original
        self._version = version
        self.tensor = original.detach().to(device, copy=True)
        self._own_version = version_of(self.tensor)

    def is_still_that_of(self, original: torch.Tensor, version: object) -> bool:
        """Whether neither has changed."""
        return (
            self._original is original
            and self._version == version
            and self._own_version == version_of(self.tensor)
        )


def write_mean(buffer: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
    """Give ``buffer`` the mean of the replicas' values or, if that isn't floating point, the first.

    What no replica has changed keeps its bits.
    """
    there = [value.to(buffer.device) for value in values]
    # By value, as not all that writes to a tensor is counted by its version.
    if not all(torch.equal(value, buffer) for value in there):
        with torch.no_grad():
            buffer.copy_(torch.stack(there).mean(0) if buffer.is_floating_point() else there[0])


class _Leaf:
    """A leaf that shares a parameter's memory or, on another device, is a copy."""

    def __init__(self, original: torch.Tensor, device: torch.device, *, is_table: bool) -> None:
        self._original = original
        self._version = version_of(original)
        self._is_shared = original.device == device
        there = original.detach()
        if not self._is_shared:
            there = there.to(device)
        if isinstance(original, nn.Parameter):
            there = nn.Parameter(there, requires_grad=original.requires_grad)
            there = leaf_as_table(there) if is_table else there
            there.__dict__.update(original.__dict__)
        self.tensor = there.requires_grad_(original.requires_grad)

    def is_still_that_of(self, original: torch.Tensor) -> bool:
        """Whether it stands for that parameter, as it is now; a copy is told what has changed."""
        leaf = self.tensor
        if self._original is not original or leaf.requires_grad != original.requires_grad:
            return False
        if self._is_shared:
            is_there = leaf.shape == original.shape if leaf.is_meta else leaf.is_set_to(original)
            return leaf.dtype == original.dtype and is_there
        if leaf.shape != original.shape or leaf.dtype != original.dtype:
            return False
        if self._version != (version := version_of(original)):
            self._version = version
            with torch.no_grad():
                leaf.copy_(original, non_blocking=True)
        return True
