"""``DistributedDataParallel``: torch's wrapper, around our engine."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call
from torch.futures import Future

from lockstep.arguments import Device, check_flag, check_module, check_type, only_device, refusal
from lockstep.comm import SingleRankGroup, backend_name, broadcast_tensors, default_group
from lockstep.grad import MIB, CommHook, describe_buckets
from lockstep.nn.backward import backward_sync_of, finish_failed
from lockstep.nn.buffers import BroadcastBuffers, check_policies
from lockstep.nn.engine import Engine
from lockstep.nn.join import DDPJoinHook, begin_joined_iteration
from lockstep.nn.mixed_precision import MixedPrecision, check_precision, reduce_in_dtype
from lockstep.nn.options import Options
from lockstep.nn.parallel_state import attach, release, state_of
from lockstep.nn.parallelize import DEFAULT_BUCKET_CAP_MB, check_bucket_cap, join
from lockstep.nn.sync_batch_norm import SyncBatchNorm
from lockstep.nn.wrapper import Wrapper
from lockstep.torch_private import tree_map_only
from lockstep.world import group_or_all, init

if TYPE_CHECKING:  # our methods have other types than torch's
    _TorchDDP = nn.Module
else:
    _TorchDDP = nn.parallel.DistributedDataParallel


# Methods of torch's reducer that trainers, or inherited methods of torch's wrapper, call. Our
# reducer needs no preparation, and raises by itself if a backward can't reduce all gradients.
_REDUCER = SimpleNamespace(
    prepare_for_forward=lambda: None,
    prepare_for_backward=lambda tensors: None,
    _rebuild_buckets=lambda: False,
    _delay_all_reduce=lambda: None,
    _check_reducer_finalized=lambda: None,
)


class DistributedDataParallel(
    Wrapper,
    _TorchDDP,
    Joinable,
    inherits=(
        "_active_ddp_module",
        "_check_reducer_finalized",
        "_get_active_ddp_module",
        "_get_data_parallel_params",
        "_register_fused_optim",
        "_set_ddp_sink_clone",
        "_set_params_and_buffers_to_ignore_for_model",
        "train",
        "will_sync_module_buffers",
    ),
):
    """A drop-in for :class:`torch.nn.parallel.DistributedDataParallel`.

    It is an instance of torch's class as well, for ``isinstance``; torch's reducer has no part. ::

        model = lockstep.DistributedDataParallel(Net().to(world.device))
        criterion(model(x), y).backward()

    The model is ``self.module``, and ``state_dict`` keys begin with ``module.``, as in torch; state
    dicts of the bare model are loaded too. Unlike in torch, every method and attribute of the model
    can be used through the wrapper (``model.middle(x)``, ``model.count = 0``), and gradients are
    synchronised whichever method computed the loss. To keep the model itself instead of a wrapper,
    use :func:`lockstep.parallelize`, whose documentation of gradients holds here too.

    ``find_unused_parameters``, ``check_reduction``, ``gradient_as_bucket_view``, ``static_graph``,
    ``delay_all_reduce_named_params``, ``param_to_hook_all_reduce``, ``batched_grad_copy`` and
    ``lazy_bucket_allocation`` are accepted, and not needed: parameters may be unused and the graph
    may change at any time, gradients are views of the buckets, which are kept from step to step,
    and all gradients are reduced alike, in the order in which they become ready.

    Args:
        module: The model, already on its device.
        device_ids: None, or the one GPU of this rank; inputs are moved there.
        output_device: Without effect: outputs stay where they are.
        dim: Without effect.
        broadcast_buffers: Whether buffers follow rank 0's, or how, as for :func:`parallelize`.
            They are exchanged with each backward, not before each forward.
        init_sync: Whether to check that the ranks' models agree and to start from rank 0's.
        process_group: The ranks to keep in step; by default all of ``lockstep.init()``.
        bucket_cap_mb: The size of a full bucket, in MiB; 25 by default.
        mixed_precision: Dtypes to compute and to reduce in, as in torch's ``_MixedPrecision``. If
            it has no ``reduce_dtype``, gradients are reduced in the parameters' own.
        device_mesh: The ranks to keep in step, as a mesh of one dimension.
        skip_all_reduce_unused_params: Whether a bucket is not sent if no rank uses its parameters.
            All ranks must then use the same parameters.
        bucket_cap_mb_list: Sizes of full buckets instead, in MiB: of the first that is full, the
            second, and so on, and the last of them for all that follow.
        forward_sync_buffers: torch's newer name for ``broadcast_buffers``, which it overrules, with
            a warning. Neither is deprecated.

    Attributes:
        module: The model.
        process_group: The ranks; None if this rank is alone.
        parameters_to_ignore: Names of parameters and buffers that each rank has for itself.

    Raises:
        ModelMismatch: If the ranks' models or options differ; it names the first difference.
        NothingToTrain: If no parameter requires a gradient.
        AlreadyParallel: If it shares parameters with a model that is parallel already.
        TypeError: If an argument, which it names, is of a wrong type.
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
        mixed_precision: MixedPrecision | None = None,
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
        check_precision(mixed_precision)
        if (delay_all_reduce_named_params is None) != (param_to_hook_all_reduce is None):
            raise ValueError(
                "delay_all_reduce_named_params and param_to_hook_all_reduce go together: give "
                "both, or none."
            )
        sizes = "a list of numbers of MiB"
        check_type("bucket_cap_mb_list", bucket_cap_mb_list, list | tuple | None, sizes)
        caps = tuple(bucket_cap_mb_list or ())
        for number, cap in enumerate(caps):
            check_bucket_cap(cap, f"bucket_cap_mb_list[{number}]")
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not caps
        bucket_cap_mb = DEFAULT_BUCKET_CAP_MB if bucket_cap_mb is None else bucket_cap_mb
        check_bucket_cap(bucket_cap_mb)
        name, policies = "broadcast_buffers", broadcast_buffers
        if forward_sync_buffers is not None:
            name, policies = "forward_sync_buffers", forward_sync_buffers
            if broadcast_buffers is not None:
                ignored = (
                    "broadcast_buffers has no effect beside forward_sync_buffers: leave it out."
                )
                warnings.warn(ignored, FutureWarning, stacklevel=2)
        if check_reduction:
            no_effect = "check_reduction is deprecated, and has no effect: leave it out."
            warnings.warn(no_effect, FutureWarning, stacklevel=2)
        policies = True if policies is None else policies
        check_policies(policies, name)
        self._input_device = only_device(module, device_ids, output_device)
        self.module = module
        self.device_ids = [self._input_device] if self._input_device else None
        self.output_device, self.dim = output_device, dim
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in caps]
        self.bucket_bytes_cap = max(self.bucket_bytes_cap_list, default=int(bucket_cap_mb * MIB))
        self.mixed_precision = mixed_precision
        self.parameters_to_ignore = frozenset(
            getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        )
        self._options = Options(
            caps or bucket_cap_mb,
            policies,
            init_sync,
            self.parameters_to_ignore,
            skip_all_reduce_unused_params,
            # What torch documents for each of the two names.
            init_buffers=forward_sync_buffers is not None,
        )
        self.process_group = _group_of(device_mesh, process_group)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self._attach()

    def _attach(self, *, is_copy: bool = False) -> None:
        attach(self, self.module, self.process_group, self._options, is_copy=is_copy)
        precision, group = self.mixed_precision, self.process_group
        if precision is not None and precision.buffer_dtype is not None:
            for buffer in filter(torch.is_floating_point, self.modules_buffers):
                buffer.data = buffer.data.to(precision.buffer_dtype)
        if precision is not None and precision.reduce_dtype is not None and group is not None:
            self._set_comm_hook(CommHook((group, precision.reduce_dtype), reduce_in_dtype))
        self._is_ready = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:  # noqa: D102 - as the module's
        if self._join_config.enable:
            begin_joined_iteration(self, self._engines)
        device = self._input_device
        if device is not None:
            arguments = (inputs, kwargs)
            inputs, kwargs = tree_map_only(torch.Tensor, lambda t: t.to(device), arguments)
        dtype = self.mixed_precision.param_dtype if self.mixed_precision is not None else None
        if dtype is None:
            return self.module(*inputs, **kwargs)
        for engine in self._engines:
            if engine.is_stale:
                # Before the casts below, which would be of the old parameters.
                backward_sync_of(engine.process_group).refresh(engine)

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        # Autograd records the casts, so the parameters get gradients of their own dtype.
        named, ignored = self.module.named_parameters(), self.parameters_to_ignore
        parameters = {name: cast(parameter) for name, parameter in named if name not in ignored}
        inputs, kwargs = tree_map_only(torch.Tensor, cast, (inputs, kwargs))
        return functional_call(self.module, parameters, inputs, kwargs)

    @property
    def _engines(self) -> list[Engine]:
        return state_of(self).engines

    # When gradients are reduced

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backwards add up gradients on each rank; the first one after reduces them."""
        return state_of(self).no_sync()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether backwards reduce gradients."""
        state = state_of(self)
        return state.is_syncing and all(engine.is_syncing for engine in state.engines)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        check_flag("require_backward_grad_sync", value)
        state_of(self).is_syncing = value
        for engine in self._engines:
            if value:
                engine.is_syncing = True
            else:
                engine.stop_syncing()

    # Trainers set it. No forward of ours exchanges buffers.
    require_forward_param_sync = True
    reducer = _REDUCER

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        release(self)

    # How gradients are reduced

    def register_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], Future[torch.Tensor]]
    ) -> None:
        """Let ``hook`` reduce gradients instead of an all-reduce.

        Args:
            state: Passed to each call.
            hook: Takes ``state`` and a bucket, whose ``buffer()`` has this rank's gradients, not
                divided by anything, and returns a future of the reduced gradients, as a tensor of
                the same size: as a rule, their mean over the ranks. It is called once for each
                bucket, in the same order on every rank, when the bucket is full. torch's hooks
                (``torch.distributed.algorithms.ddp_comm_hooks``) may be given.

        Raises:
            TypeError: If ``hook`` can't be called.
            RuntimeError: If there is a hook already.
        """
        if not callable(hook):
            raise TypeError(f"The communication hook is {hook!r}, which can't be called.")
        if not self._engines:  # the rank is alone, but the hook must be called
            group: Any = self.process_group or SingleRankGroup()
            self._engines.append(backward_sync_of(group).new_engine(self.module, self._options))
        if self.process_group is None:
            hook = default_group()(hook)
        for engine in self._engines:
            if engine.reducer.comm_hook is not None:
                raise RuntimeError(
                    f"The communication hook {engine.reducer.comm_hook.name} is registered "
                    "already, and there can be one."
                )
        self._set_comm_hook(CommHook(state, hook))

    def _set_comm_hook(self, hook: CommHook) -> None:
        for engine in self._engines:
            finish_failed(engine.process_group)
            engine.reducer.comm_hook = hook

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        kind = dist.BuiltinCommHookType
        wanted = "a torch.distributed.BuiltinCommHookType"
        check_type("comm_hook_type", comm_hook_type, kind, wanted)
        is_half = comm_hook_type == kind.FP16_COMPRESS
        hook = default_hooks.fp16_compress_hook if is_half else default_hooks.allreduce_hook
        self.register_comm_hook(self.process_group, hook)

    def _register_buffer_comm_hook(
        self, state: Any, hook: Callable[[Any, Any], Any], comm_hook_location: object = None
    ) -> None:
        # Buffers are exchanged when gradients are reduced, wherever torch would.
        if not callable(hook):
            raise TypeError(refusal("hook", hook, "a function of a state and a dict of buffers"))
        for engine in self._engines:
            engine.buffers.hook = functools.partial(hook, state)

    def _default_broadcast_coalesced(  # which hooks of buffers call
        self,
        bufs: Sequence[torch.Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
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

        With ``enable=False`` it does nothing.
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
        """Join a :class:`torch.distributed.algorithms.Join` context, along with others."""
        by_all = kwargs.get("divide_by_initial_world_size", True)
        return DDPJoinHook(self, self._engines, divide_by_active=not by_all)

    @property
    def join_process_group(self) -> dist.ProcessGroup | None:
        """The ranks that join."""
        return self.process_group

    # Attributes of torch's wrapper

    @property
    def _parameters_in_step(self) -> list[nn.Parameter]:
        ignored = self.parameters_to_ignore
        return [p for name, p in self.module.named_parameters() if name not in ignored]

    @property
    def device(self) -> torch.device:
        """Where the first parameter is that isn't ignored."""
        return self._parameters_in_step[0].device

    join_device = device  # for the tensors of torch's Join context

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
            if engine.module is self.module:  # parallel parts keep policies of their own
                engine.set_buffer_policies(value)

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

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        group, reducers = self.process_group, [engine.reducer for engine in self._engines]
        parameters, sync_norms = self._parameters_in_step, SyncBatchNorm | nn.SyncBatchNorm
        return {
            "module_name": type(self.module).__name__,
            "world_size": group.size() if group is not None else 1,
            "rank": group.rank() if group is not None else 0,
            "backend_name": backend_name(group, self.device) if group is not None else None,
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "bucket_sizes": [b.gradient_bytes for r in reducers for b in describe_buckets(r)],
            "num_backwards": sum(engine.num_backwards for engine in self._engines),
            "unused_parameters": [name for reducer in reducers for name in reducer.unused],
            "comm_hook": next((r.comm_hook.name for r in reducers if r.comm_hook), None),
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "broadcast_buffers": self.broadcast_buffers,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "has_sync_bn": any(isinstance(each, sync_norms) for each in self.module.modules()),
            "is_multi_device_module": len({parameter.device for parameter in parameters}) > 1,
        }

    # Conversions and copies

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        moved = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for engine in self._engines:
            # torch may have replaced parameters that were moved.
            if engine.number:
                engine.take_move()
            else:  # a copied model, which may have no forward before its parameters are used
                engine.is_stale = True
                backward_sync_of(engine.process_group).refresh(engine)
        return moved

    def __getstate__(self) -> dict[str, Any]:
        """Return all attributes but the group: a loaded wrapper has the default one."""
        if self.process_group not in (None, init().process_group):
            raise RuntimeError(
                "This DistributedDataParallel has a process group of its own, which can't be "
                "pickled. Pickle its module, or its state_dict()."
            )
        return {**self.__dict__, "process_group": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become parallel again, among the ranks of ``lockstep.init()``."""
        self._become_copy({**state, "process_group": init().process_group})

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        """Return a wrapper around a copy of the model, over the same group."""
        memo[id(self.process_group)] = self.process_group
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied._become_copy(copy.deepcopy(self.__dict__, memo))
        return copied

    def _become_copy(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        self._attach(is_copy=True)


def _group_of(mesh: DeviceMesh | None, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if mesh is None:
        return group_or_all(group)
    check_type("device_mesh", mesh, DeviceMesh, "a DeviceMesh, as init_device_mesh() makes it")
    if group is not None:
        raise RuntimeError("Give a process_group or a device_mesh, not both.")
    if mesh.ndim != 1:
        raise RuntimeError(
            f"device_mesh has {mesh.ndim} dimensions, but must have one: that of the replicas. "
            "Take it out of the mesh by its name, as in mesh['dp']."
        )
    return mesh.get_group(0)
