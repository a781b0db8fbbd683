"""``DistributedDataParallel``: torch's wrapper, around our engine."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.futures import Future

from lockstep.arguments import check_flag, check_module, check_type, refusal
from lockstep.comm import broadcast_tensors
from lockstep.grad import MIB, CommHook
from lockstep.nn import mixed_precision as precisely
from lockstep.nn.arguments import Device, group_of, only_device
from lockstep.nn.buffers import BroadcastBuffers, check_policies
from lockstep.nn.engine import Engine, Options
from lockstep.nn.global_hooks import mark_stale
from lockstep.nn.join import DDPJoinHook, JoinedModels, join_models
from lockstep.nn.logging_data import logging_data
from lockstep.nn.parallel_state import (
    accumulating,
    attach,
    attach_lone_engine,
    check_bucket_cap,
    engines_of,
    release,
)
from lockstep.nn.parallelize import DEFAULT_BUCKET_CAP_MB, join
from lockstep.nn.wrapper import Wrapper
from lockstep.torch_private import _as_overlapped_optim, _JoinConfig, tree_map_only
from lockstep.world import init

if TYPE_CHECKING:  # what is overridden takes and has other types
    _TorchDDP = nn.Module
else:
    _TorchDDP = nn.parallel.DistributedDataParallel


class _Prepared:
    """What trainers call of torch's reducer around a forward or backward: nothing is needed here.

    They do so if the backward whose gradients are to be reduced isn't of the last forward. Here
    all depends on the backward. Other methods of torch's reducer are missing.
    """

    def prepare_for_forward(self) -> None:
        pass

    def prepare_for_backward(self, tensors: Collection[torch.Tensor]) -> None:
        pass

    def _rebuild_buckets(self) -> bool:
        return False

    def _delay_all_reduce(self) -> None:
        pass


class DistributedDataParallel(
    Wrapper,
    _TorchDDP,
    Joinable,
    inherits=(
        "_active_ddp_module",
        "_get_active_ddp_module",
        "_get_data_parallel_params",
        "_set_params_and_buffers_to_ignore_for_model",
        "train",
        "will_sync_module_buffers",
    ),
):
    """A drop-in for :class:`torch.nn.parallel.DistributedDataParallel`.

    It is an instance of torch's class as well, for who asks, but has none of its reducer.

    The model is ``self.module``, and ``state_dict`` keys begin with ``module.``, as there; those
    without are loaded too. Other than there, every method and attribute of the model can be used
    through the wrapper (``model.middle(x)``, ``model.count = 0``), and gradients are synchronised
    whichever method made the loss. To keep the model itself instead of a wrapper, use
    :func:`lockstep.parallelize`; what is said there of gradients holds here too.

    Args:
        module: The model, already on its device.
        device_ids: None, or the one GPU of this rank; inputs are moved there.
        output_device: Only for compatibility: outputs stay where they are.
        dim: Only for compatibility.
        broadcast_buffers: Whether buffers follow rank 0's, or how, as for :func:`parallelize`.
            They do so with each backward, not before each forward.
        init_sync: Whether to check that the ranks' models agree and to start from rank 0's.
        process_group: The ranks to keep in step; by default all of ``lockstep.init()``.
        bucket_cap_mb: How much makes a bucket full, in MiB; 25 by default.
        find_unused_parameters: Not needed: parameters may be unused at any time.
        check_reduction: Not needed, as in torch.
        gradient_as_bucket_view: Not needed: gradients are views of the buckets.
        static_graph: Not needed: the graph may change or not.
        delay_all_reduce_named_params: Not needed: these gradients are reduced like the others, in
            buckets that are in the order in which gradients come.
        param_to_hook_all_reduce: Given with ``delay_all_reduce_named_params``, and as little
            needed.
        mixed_precision: Dtypes to compute and to reduce in, as in torch's ``_MixedPrecision``. If
            it has no ``reduce_dtype``, gradients are reduced in the parameters' own.
        device_mesh: The ranks to keep in step, as a mesh of one dimension.
        skip_all_reduce_unused_params: Whether buckets of which no rank uses anything are not sent.
            All ranks must then use the same parameters.
        bucket_cap_mb_list: Only for compatibility: the last size is that of all buckets.
        batched_grad_copy: Not needed: gradients are copied together.
        forward_sync_buffers: torch's newer name for ``broadcast_buffers``, which it overrules.
        lazy_bucket_allocation: Only for compatibility: buckets are kept from step to step.

    Attributes:
        module: The model.
        process_group: The ranks; None if this one is alone.
        parameters_to_ignore: Names of parameters and buffers that are left alone.

    Raises:
        ModelMismatch: If the ranks' models or options differ; it names the first difference.
        NothingToTrain: If no parameter requires a gradient.
        AlreadyParallel: If it shares parameters with a model that is parallel already.
        TypeError: If an argument is of a wrong type; it says which.
        ValueError: If ``bucket_cap_mb`` is no size, or ``device_ids`` names no device, or several.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        broadcast_buffers: BroadcastBuffers | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: precisely.MixedPrecision | None = None,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        check_module(module)
        check_flag("init_sync", init_sync)
        check_flag("skip_all_reduce_unused_params", skip_all_reduce_unused_params)
        precisely.check_precision(mixed_precision)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce go together: give "
                "both, or none."
            )
        sizes = "a list of numbers of MiB"
        check_type("bucket_cap_mb_list", bucket_cap_mb_list, list | tuple | None, sizes)
        if bucket_cap_mb is None:
            bucket_cap_mb = [DEFAULT_BUCKET_CAP_MB, *(bucket_cap_mb_list or ())][-1]
            check_bucket_cap(bucket_cap_mb, "bucket_cap_mb_list[-1]")
        check_bucket_cap(bucket_cap_mb)
        name, follow = "broadcast_buffers", broadcast_buffers
        if forward_sync_buffers is not None:
            name, follow = "forward_sync_buffers", forward_sync_buffers
        follow = True if follow is None else follow
        check_policies(follow, name)
        self._input_device = only_device(module, device_ids, output_device)
        self.module = module
        self.device_ids = [self._input_device] if self._input_device else None
        self.output_device = output_device
        self.dim = dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.mixed_precision = mixed_precision
        self.parameters_to_ignore = frozenset(
            getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        self._options = Options(
            bucket_cap_mb,
            follow,
            init_sync,
            self.parameters_to_ignore,
            skip_all_reduce_unused_params,
            # What torch documents for each of the two names.
            init_buffers=forward_sync_buffers is not None,
        )
        self.process_group = group_of(device_mesh, process_group)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._attach()

    def _attach(self, *, is_copy: bool = False) -> None:
        # Weakly: torch's Join context has it, and is done with it if it is left with an error.
        self._joined: weakref.ref[JoinedModels] | None = None
        attach(self, self.module, self.process_group, self._options, is_copy=is_copy)
        if self.mixed_precision is not None:
            if self.mixed_precision.buffer_dtype is not None:
                precisely.cast_buffers(
                    self.module, self.mixed_precision.buffer_dtype, self.parameters_to_ignore
                )
            if self.process_group is not None:
                self._set_comm_hook(precisely.comm_hook(self.mixed_precision, self.process_group))
        self._is_ready = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: D102 - as the module's
        if self._join_config.enable:
            self._begin_joined_iteration()
        if self._input_device is not None:
            inputs, kwargs = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(self._input_device), (inputs, kwargs)
            )
        if self.mixed_precision is not None and self.mixed_precision.param_dtype is not None:
            for engine in self._engines:
                if engine.is_stale:
                    engine.refresh()  # before parameters are replaced by what they are cast to
            return precisely.call_in_precision(
                self.module,
                self.mixed_precision.param_dtype,
                self.parameters_to_ignore,
                inputs,
                kwargs,
            )
        return self.module(*inputs, **kwargs)

    # When gradients are reduced

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards add up gradients on each rank; the first one after reduces them."""
        return accumulating(self._engines)

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards reduce gradients."""
        return all(engine.is_syncing for engine in self._engines)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        check_flag("require_backward_grad_sync", value)
        for engine in self._engines:
            engine.is_syncing = value

    # Trainers set it. Here no forward exchanges anything.
    require_forward_param_sync = True
    reducer = _Prepared()

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept it: outputs are never cloned."""

    def _check_reducer_finalized(self) -> None:
        """Accept it: a backward that doesn't reduce all that it has to raises."""

    def _remove_autograd_hooks(self) -> None:
        release(self)

    # How they are reduced

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], Future[torch.Tensor]]
    ) -> None:
        """Let ``hook`` reduce gradients instead of an all-reduce.

        Args:
            state: Passed to each call.
            hook: Takes ``state`` and a bucket, whose ``buffer()`` has this
                rank's gradients, not divided by anything, and returns a future of what they are
                to be, as one tensor of the same size: as a rule the mean over the ranks. It is
                called once for each bucket, in the same order on every rank, when the bucket is
                full. torch's hooks (``torch.distributed.algorithms.ddp_comm_hooks``) may be given.

        Raises:
            TypeError: If ``hook`` can't be called.
            RuntimeError: If there is a hook already.
        """
        if not callable(hook):
            raise TypeError(f"The communication hook is {hook!r}, which can't be called.")
        if not self._engines:
            attach_lone_engine(self, self.module, self.process_group, self._options)
        for engine in self._engines:
            if engine.reducer.comm_hook is not None:
                raise RuntimeError(
                    f"The communication hook {engine.reducer.comm_hook.name} is registered "
                    "already, and there can be one."
                )
        self._set_comm_hook(CommHook(state, hook))

    def _set_comm_hook(self, hook: CommHook | None) -> None:
        for engine in self._engines:
            engine.backward_sync.finish_failed()
            engine.reducer.comm_hook = hook

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: object = None,
    ) -> None:
        """Let ``hook`` exchange buffers, when gradients are reduced, wherever torch would."""
        if not callable(hook):
            raise TypeError(refusal("hook", hook, "a function of a state and a dict of buffers"))
        for engine in self._engines:
            engine.buffers.hook = functools.partial(hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        kind = dist.BuiltinCommHookType
        check_type(
            "comm_hook_type", comm_hook_type, kind, "a torch.distributed.BuiltinCommHookType"
        )
        hooks = {
            dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
            dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
        }
        self.register_comm_hook(self.process_group, hooks[comm_hook_type])

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        _as_overlapped_optim(optim, optim_params, args, kwargs).register_ddp(self)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """What a hook of buffers may call."""
        if self.process_group is not None:
            buffers = self.modules_buffers if bufs is None else bufs
            broadcast_tensors(self.process_group, buffers, source=authoritative_rank)

    # Loops of different lengths

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """Let ranks leave a training loop at different times, as :func:`lockstep.join` does.

        Args:
            divide_by_initial_world_size: As there.
            enable: Whether to do this at all.
            throw_on_early_termination: As there.
        """
        check_flag("enable", enable)
        if not enable:
            return nullcontext()
        return join(
            self,
            divide_by_initial_world_size=divide_by_initial_world_size,
            throw_on_early_termination=throw_on_early_termination,
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What :class:`torch.distributed.algorithms.Join` calls, to join it with others."""
        models = None
        if self._engines and self.process_group is not None:
            by_all = kwargs.get("divide_by_initial_world_size", True)
            models = join_models(
                self._engines, self.process_group, self.device, divide_by_active=not by_all
            )
            self._joined = weakref.ref(models)
        return DDPJoinHook(models, self._engines, self._leave_join)

    def _leave_join(self) -> None:
        self._joined = None
        self._join_config = _JoinConfig.construct_disabled_join_config()

    @property
    def join_device(self) -> torch.device:
        """A device whose tensors the process group can carry."""
        return self.device

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that join."""
        return self.process_group

    def _begin_joined_iteration(self) -> None:
        for engine in self._engines:
            engine.backward_sync.finish_failed()
        joined = self._joined() if self._joined is not None else None
        if joined is None and self._engines:
            self._leave_join()  # the context was left with an error
            return
        if joined is not None and self._join_config.is_first_joinable:
            joined.begin_iteration()
        Join.notify_join_context(self)

    @property
    def _engines(self) -> list[Engine]:
        return engines_of(self)

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return next(self.module.parameters()).device

    @property
    def device_type(self) -> str:
        """The kind of device the model is on."""
        return self.device.type

    @property
    def broadcast_buffers(self) -> BroadcastBuffers:
        """Whether buffers follow rank 0's, or how."""
        return self._options.broadcast_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: BroadcastBuffers) -> None:
        check_policies(value)
        self._options = self._options._replace(broadcast_buffers=value)
        for engine in self._engines:
            engine.buffers.follow(value, self.module)

    forward_sync_buffers = broadcast_buffers

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return any(engine.reducer.is_rearranged for engine in self._engines)

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that are not ignored, by name."""
        buffers = self.module.named_buffers()
        return {name: b for name, b in buffers if name not in self.parameters_to_ignore}

    @property
    def modules_buffers(self) -> list[torch.Tensor]:
        """The buffers that are not ignored."""
        return list(self.named_module_buffers.values())

    @property
    def bucket_bytes_cap(self) -> int:
        """How much makes a bucket full, in bytes."""
        return int(self._options.bucket_cap_mb * MIB)

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {
            **logging_data(self.module, self._engines, self.process_group),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "broadcast_buffers": self.broadcast_buffers,
        }

    # What a module does

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for engine in self._engines:
            # A parameter that was moved may be another object.
            if engine.number:
                mark_stale(engine)
            else:  # a copy, of which there may never be a forward
                engine.refresh()
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the group: a pickled wrapper takes its place in the default one."""
        if self.process_group not in (None, init().process_group):
            raise RuntimeError(
                "This DistributedDataParallel has a process group of its own, which can't be "
                "pickled. Pickle its module, or its state_dict()."
            )
        return self._state()

    def _state(self) -> dict[str, Any]:
        left_out = ("process_group", "_joined", "_is_ready")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become parallel again, among the ranks of ``lockstep.init()``."""
        nn.Module.__setstate__(self, state)
        self.process_group = init().process_group
        self._attach(is_copy=True)

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """A wrapper around a copy of the model, over the same group."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        nn.Module.__setstate__(copied, copy.deepcopy(self._state(), memo))
        copied.process_group = self.process_group
        copied._attach(is_copy=True)
        return copied
