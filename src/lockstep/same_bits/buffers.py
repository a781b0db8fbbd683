"""The buffers of a model in a step of several shards, such as BatchNorm's running statistics."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from lockstep.comm import all_gather, broadcast_tensors
from lockstep.errors import ModelError
from lockstep.same_bits.late import bytes_of, digest_on_device, has_other_bits


class _SlotOfStep(NamedTuple):
    """An attribute of a module that holds a buffer, its value when the step began, and its policy.

    The program may put another tensor there at any time.
    """

    module: nn.Module
    attribute: str
    name: str
    policy: str
    tensor: torch.Tensor
    before: torch.Tensor

    @property
    def is_on_device(self) -> bool:
        """Whether the host would have to wait for a comparison of its values."""
        return self.before.device.type != "cpu"

    @property
    def is_exchanged(self) -> bool:
        """Whether its value at the end of the step is one for all ranks."""
        return self.policy in ("rank0", "mean")


class BuffersOfStep:
    """Lets each shard start from the values that the buffers had when the step began.

    Whether a shard has changed one on a device is known when the numbers of :meth:`unread` are.

    At the end a buffer of policy "rank0" has the value that it had after shard 0, one of policy
    "mean" the mean of its values after each shard, added in their order.

    Args:
        module: The model.
        policy_of: Returns the policy of a buffer by its name.
    """

    def __init__(self, module: nn.Module, policy_of: Callable[[str], str]) -> None:
        self._slots: list[_SlotOfStep] = []
        found: set[int] = set()
        for path, each in module.named_modules():
            for attribute, tensor in each._buffers.items():
                if tensor is not None and id(tensor) not in found:
                    found.add(id(tensor))
                    name = f"{path}.{attribute}" if path else attribute
                    before = tensor.detach().clone()
                    slot = _SlotOfStep(each, attribute, name, policy_of(name), tensor, before)
                    self._slots.append(slot)
        # By shard and number of the buffer, those that the shard has changed.
        self._after: dict[int, dict[int, torch.Tensor]] = {}
        # Of those on devices, by shard and number, whether the shard has changed it; and what
        # their values before the step have in common on all ranks, once it is read.
        self._has_changed: dict[tuple[int, int], torch.Tensor] = {}
        self._digests: list[float] = []
        self._has_begun = False

    def unread(self) -> list[torch.Tensor]:
        """Return numbers that devices compute, for :meth:`take_read`, after the last shard."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for slot in self._slots:
            if slot.is_on_device and slot.is_exchanged and slot.before.numel():
                by_device.setdefault(slot.before.device, []).append(slot.before)
        return [*self._has_changed.values(), *map(digest_on_device, by_device.values())]

    def take_read(self, numbers: Sequence[float]) -> None:
        """Take the numbers of :meth:`unread`.

        Raises:
            ModelError: If a shard has changed a buffer that each rank has for itself.
        """
        self._digests = [*numbers[len(self._has_changed) :]]
        for ((shard, number), _), has in zip(self._has_changed.items(), numbers, strict=False):
            if not has:
                self._after[shard].pop(number, None)
            elif not self._slots[number].is_exchanged:
                self._refuse_change(shard, self._slots[number])

    def digest(self) -> int:
        """Return a number that equal values before the step have in common."""
        digest = zlib.crc32(repr(self._digests).encode()) if self._digests else 0
        for slot in self._slots:
            if slot.is_exchanged and not slot.is_on_device:
                digest = zlib.crc32(bytes_of(slot.before).numpy().data, digest)
        return digest

    def begin_shard(self) -> None:
        """Give all buffers the values that they had when the step began."""
        for slot in self._slots:
            if self._has_begun if slot.is_on_device else not self._is_as_before(slot):
                self._put(slot, slot.before)
        self._has_begun = True

    def end_shard(self, shard: int) -> None:
        """Keep the values of buffers that ``shard`` has changed.

        Raises:
            ModelError: If one has another form now, or is one that each rank has for itself.
        """
        after = self._after[shard] = {}
        for number, slot in enumerate(self._slots):
            if not slot.is_on_device and self._is_as_before(slot):
                continue
            tensor = slot.module._buffers.get(slot.attribute)
            if tensor is None or _form(tensor) != _form(slot.before):
                now = "gone" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
                raise ModelError(
                    f"The buffer {slot.name!r} was {tuple(slot.before.shape)} {slot.before.dtype} "
                    f"before shard {shard}, and is {now} after it. Under shards() a buffer keeps "
                    "its form: each shard starts from the value that it had before the step."
                )
            if slot.is_on_device:
                if slot.policy == "rank0" and shard:
                    continue
                self._has_changed[shard, number] = has_other_bits(tensor, slot.before)
            elif not slot.is_exchanged:
                self._refuse_change(shard, slot)
            if slot.is_exchanged:
                after[number] = tensor.detach().clone()

    @staticmethod
    def _refuse_change(shard: int, slot: _SlotOfStep) -> NoReturn:
        raise ModelError(
            f"Shard {shard} has changed the buffer {slot.name!r}, whose policy is "
            f"{slot.policy!r}: each rank keeps its own, so that its value depends on the "
            'number of ranks. Under shards() let its policy be "rank0" or "mean".'
        )

    def changed(self) -> list[bool]:
        """Return for each buffer whether its value at the end depends on shards of this rank."""
        return [
            any(
                number in after
                for shard, after in self._after.items()
                if slot.policy == "mean" or shard == 0
            )
            for number, slot in enumerate(self._slots)
        ]

    def finish(
        self,
        group: dist.ProcessGroup | None,
        changed: Sequence[bool],
        shards: Sequence[Sequence[int]],
    ) -> None:
        """Give the buffers their values after the step. Every rank must call it; it blocks.

        Args:
            group: The ranks; None for one alone.
            changed: For each buffer, whether any rank said that it has :meth:`changed`.
            shards: For each rank, the numbers of its shards that had samples.
        """
        self.begin_shard()
        numbers = [number for number, has in enumerate(changed) if has]
        firsts = [each for each in numbers if not self._is_mean(each)]
        values = {each: self._value(0, each).clone() for each in firsts}
        if group is not None and values:
            broadcast_tensors(group, values.values(), 0)  # which has shard 0
        averaged = [each for each in numbers if self._is_mean(each)]
        alike: dict[object, list[int]] = {}
        for each in averaged:
            before = self._slots[each].before
            alike.setdefault((before.dtype, before.device), []).append(each)
        for its in alike.values():
            values |= self._means(group, its, shards)
        for number, value in values.items():
            self._put(self._slots[number], value)

    def _means(
        self,
        group: dist.ProcessGroup | None,
        numbers: Sequence[int],
        shards: Sequence[Sequence[int]],
    ) -> dict[int, torch.Tensor]:
        """Return means, of buffers of one dtype on one device."""
        rank = 0 if group is None else group.rank()
        sizes = [self._slots[each].before.numel() for each in numbers]
        rows = [
            torch.cat([self._value(shard, each).reshape(-1) for each in numbers])
            for shard in shards[rank]
        ]
        if group is not None:
            most = max(map(len, shards))
            nothing = self._slots[numbers[0]].before.new_zeros(sum(sizes))
            mine = torch.stack([*rows, *[nothing] * (most - len(rows))])
            gathered = all_gather(group, mine)
            rows = [
                row for each, its in zip(gathered, shards, strict=True) for row in each[: len(its)]
            ]
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        total /= len(rows)
        parts = zip(numbers, total.split(sizes), strict=True)
        return {each: part.reshape(self._slots[each].before.shape) for each, part in parts}

    def _is_mean(self, number: int) -> bool:
        slot = self._slots[number]
        has_mean = slot.before.is_floating_point() or slot.before.is_complex()
        return slot.policy == "mean" and has_mean

    def _value(self, shard: int, number: int) -> torch.Tensor:
        """The value of a buffer after ``shard``."""
        return self._after.get(shard, {}).get(number, self._slots[number].before)

    @staticmethod
    def _is_as_before(slot: _SlotOfStep) -> bool:
        # Not by the tensor's version, which BatchNorm leaves as it is.
        now = slot.module._buffers.get(slot.attribute)
        return now is slot.tensor and _have_same_bits(now, slot.before)

    @staticmethod
    def _put(slot: _SlotOfStep, value: torch.Tensor) -> None:
        """Let the tensor that was there when the step began be there, with ``value``.

        Autograd notices, and refuses a backward that needs what was there.
        """
        slot.module._buffers[slot.attribute] = slot.tensor
        if _form(slot.tensor) != _form(value):  # as after .data = ...
            slot.tensor.data = value.clone()
            return
        with torch.no_grad():
            slot.tensor.copy_(value)


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if _form(one) != _form(other):
        return False
    return torch.equal(bytes_of(one), bytes_of(other))


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
