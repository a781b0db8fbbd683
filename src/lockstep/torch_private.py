"""All private names of torch that lockstep uses, and their purpose.

A name is private if it begins with an underscore, or is in a module whose name does: any release
of torch may rename it. Other modules import such names from here, and may use only those attributes
of torch's objects that :data:`ATTRIBUTES` lists. tests/test_torch_private.py verifies that, and
reports names that a release of torch no longer has.

``import torch`` imports lockstep.comm.backends, which therefore must not import this module: it
would fail if a name is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.algorithms.join
import torch.distributed.distributed_c10d
import torch.jit._builtins
import torch.nn.modules.batchnorm
import torch.overrides
import torch.utils._device
import torch.utils._pytree
import torch.utils.data._utils.worker

# Autograd. The number of the backward that runs in this thread; -1 if none runs.
_current_graph_task_id = torch._C._current_graph_task_id
# How many nodes of graphs this thread has made: whether a nested backward may have run since.
_get_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
# The node that runs in this thread; None in a backward of compiled autograd, which runs no nodes.
_current_autograd_node = torch._C._current_autograd_node
# Whether the backward that runs here will reach a parameter: which gradients to wait for.
_will_engine_execute_node = torch._C._will_engine_execute_node
# Whether that backward was called with retain_graph=True: DataParallel's replicas do the same.
_get_current_graph_task_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph
# The innermost transform of torch.func around this code, and the open levels of forward-mode AD.
peek_interpreter_stack: Callable[[], object] = torch._C._functorch.peek_interpreter_stack


def forward_level() -> int:
    """Return the level of forward-mode AD that is open; -1 if none is."""
    return torch.autograd.forward_ad._current_level


# Whether a tensor is one that torch.func's grad(), vmap() or jvp() calls a function with.
is_functorch_wrapped_tensor = torch._C._functorch.is_functorch_wrapped_tensor
# The tensor within, which may be wrapped too.
get_unwrapped = torch._C._functorch.get_unwrapped
# Its queue_callback() calls a function at the end of the running backward.
_execution_engine = torch.autograd.Variable._execution_engine

# Dynamo. Excludes a function from tracing, without an import of torch._dynamo and a wrapper.
_FrameAction = torch._C._dynamo.eval_frame._FrameAction
_FrameExecStrategy = torch._C._dynamo.eval_frame._FrameExecStrategy
set_code_exec_strategy = torch._C._dynamo.eval_frame.set_code_exec_strategy

# Tensors. Inference mode as a guard, without the cost of torch.inference_mode().
_InferenceMode = torch._C._InferenceMode
# Lets a subclass of Tensor call torch's functions without its own __torch_function__.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# The __torch_function__ of a subclass whose functions are those of a plain tensor.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl
# The number of modes that see each operator, such as those of fake tensors.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# The gradient that autograd accumulates to: lockstep has parameters with a property of this name.
_grad: Any = torch.Tensor.grad
gradient_of: Callable[[torch.Tensor], torch.Tensor | None] = _grad.__get__
set_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _grad.__set__
# Arithmetic on the gradients of a bucket in one call.
_foreach_add_ = torch._foreach_add_
_foreach_copy_ = torch._foreach_copy_
_foreach_mul_ = torch._foreach_mul_
# How many tensors use a storage: whether the program has any of the memory of gradients.
storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
# The default device, which is set in the replicas' threads too.
DeviceContext = torch.utils._device.DeviceContext
_get_current_function_mode_stack: Callable[[], list[Any]] = (
    torch.overrides._get_current_function_mode_stack
)
# Moves and casts the tensors among a forward's arguments, as torch's DDP does.
tree_map_only = torch.utils._pytree.tree_map_only
# The tensors of a batch, whatever its nesting.
tree_leaves = torch.utils._pytree.tree_leaves

# Data. What a worker of a DataLoader is told, which lockstep lets count the workers of all ranks;
# and what iterates over a DataLoader, whose time a trace has.
worker = torch.utils.data._utils.worker
_BaseDataLoaderIter = torch.utils.data.dataloader._BaseDataLoaderIter
WorkerInfo = torch.utils.data._utils.worker.WorkerInfo

# TorchScript. What scripted code calls in place of a function of Python.
_register_builtin = torch.jit._builtins._register_builtin

# Modules. The base of all normalisations with running statistics, that of the BatchNorms, and the
# state of a Joinable.
_NormBase = torch.nn.modules.batchnorm._NormBase
_BatchNorm = torch.nn.modules.batchnorm._BatchNorm
_JoinConfig = torch.distributed.algorithms.join._JoinConfig

# Process groups. The options of all_gather, the only ones that torch doesn't export.
AllgatherOptions = torch._C._distributed_c10d.AllgatherOptions
# The argument of the function that creates a group of a registered backend.
_DistributedBackendOptions = torch.distributed.distributed_c10d._DistributedBackendOptions
# The store of the default group, through which ranks tell each other their hosts.
_get_default_store = torch.distributed.distributed_c10d._get_default_store
# The record of a process's groups; a rank that is a thread has one of its own.
_World = torch.distributed.distributed_c10d._World
# Whether a thread has a record of its own for functional collectives, too.
_set_thread_isolation_mode = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]


# Attributes of torch's modules and objects that are read, written, called or overridden.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "torch.distributed.distributed_c10d": {
        "_rank_not_in_group": "each collective asks it first: so one can be refused in a trial",
        "_world": "the record of groups, which is replaced while ranks are threads",
    },
    "torch.distributed.rendezvous": {
        "_create_c10d_store": "is replaced: the ranks of one host have a store in a file",
    },
    "torch.Tensor": {
        "_backward_hooks": "whether the program's hooks see a gradient before it is accumulated",
        "_make_subclass": "a parameter of an embedding that replicas look up together",
        "_make_wrapper_subclass": "tensors of which a rank has only some elements",
        "_post_accumulate_grad_hooks": "whether others have hooks on a new gradient",
        "_use_count": "whether a graph needs a buffer that is to be overwritten, or a parameter",
        "_version": "whether a tensor was written to since the replicas were told its values",
    },
    "torch.UntypedStorage": {
        "_cdata": "the memory of gradients, whose users are counted",
    },
    "torch.nn.Module": {
        "_apply": "conversions of a wrapper's module, after which it is looked at anew",
        "_buffers": "buffers by name, of which None is one too",
        "_forward_pre_hooks": "hooks of one module, of which one is refreshed before its forward",
        "_load_from_state_dict": "loads state dicts without the wrapper's prefix",
        "_modules": "children by name",
        "_parameters": "parameters by name, which are replaced in replicas",
    },
    "torch.nn.functional": {
        "_no_grad_embedding_renorm_": "is replaced: ranks take over the rows that lookups scale",
    },
    "torch.ops.aten": {
        "_embedding_bag": "looks up bags, and tells what their backward needs",
        "_embedding_bag_backward": "the gradient of their table",
        "_embedding_bag_per_sample_weights_backward": "that of their weights",
        "_to_copy": "converts such a tensor: torch does so as it loads an optimizer's state",
    },
    "torch.ops.aten.add.Tensor": {
        "_schema": "whether a call returns anything",
    },
    "torch._dynamo.eval_frame.OptimizedModule": {
        "_orig_mod": "the module that was compiled, whose keys a checkpoint has",
    },
    "torch.compile": {
        "_torchdynamo_orig_callable": "the function that was compiled, such as an optimizer's step",
    },
    "torch.optim.Optimizer": {
        "_optimizer_step_post_hooks": "put in order: that of a sharded optimizer comes first",
        "_optimizer_step_pre_hooks": "the same; it comes last",
    },
    "torch.amp.GradScaler": {
        "_found_inf_per_device": "whether it skips the update of an optimizer",
        "_growth_tracker": "after how many steps the scale grows, as it was before a step",
        "_per_optimizer_states": "what it knows of a step, forgotten with a skipped one",
        "_scale": "the loss scale on its device, which is the same on all ranks",
        "_unscale_grads_": "is replaced: all ranks skip the same steps",
    },
    "torch.nn.RNN": {
        "_flat_weights": "a recurrent module's second list of its parameters",
        "_flat_weights_names": "their names",
    },
    "torch.nn.BatchNorm1d": {
        "_check_input_dim": "SyncBatchNorm takes any number of dimensions",
    },
    "torch.nn.Module.state_dict": {
        "_metadata": "versions of modules, in a state dict",
    },
    "torch.distributed.autograd": {
        "_current_context": "whether a forward runs where gradients are kept from the parameters",
    },
    "torch.distributed.optim.optimizer": {
        "_LocalOptimizer": "steps with gradients of distributed backwards, where RPC calls it",
    },
    "torch.distributed.rpc.api": {
        "_is_current_rpc_agent_set": "whether there may be distributed backwards in this program",
    },
    "torch.autograd.profiler": {
        "_is_profiler_enabled": "whether to make spans ranges of torch.profiler",
    },
    "torch.autograd.profiler.profile": {
        "_prepare_trace": "to end our recording of operators where the program begins its own",
    },
    "torch.utils.data._utils.worker": {
        "_worker_info": "what get_worker_info() returns",
    },
    "torch.utils.data.dataloader._BaseDataLoaderIter": {
        "_dataset": "what a loader reads, whose class a trace notes",
        "_index_sampler": "by which iterators over the same loader are known",
        "_num_workers": "the number of its workers, which a trace notes",
        "_persistent_workers": "whether it keeps them; only an iterator with workers has it",
    },
    "torch.distributed.optim.apply_optimizer_in_backward": {
        "_in_backward_optimizers": "optimizers that torch lets step in a parameter's backward",
    },
    "torch.nn.parallel.DistributedDataParallel": {
        "_active_ddp_module": "asked for by dynamo; ours is never active",
        "_check_reducer_finalized": "inherited: programs call it between steps",
        "_default_broadcast_coalesced": "overridden: a buffer hook calls it",
        "_get_active_ddp_module": "the same as _active_ddp_module",
        "_get_data_parallel_params": "inherited: the parameters that are reduced",
        "_get_ddp_logging_data": "overridden: programs log it",
        "_register_buffer_comm_hook": "overridden: programs replace the broadcast of buffers",
        "_register_builtin_comm_hook": "overridden: programs choose a hook that is written in C++",
        "_register_fused_optim": "inherited: programs have optimizers step in the backward",
        "_remove_autograd_hooks": "overridden: programs end the synchronisation",
        "_set_ddp_sink_clone": "inherited: programs set it",
        "_set_params_and_buffers_to_ignore_for_model": "inherited: sets the following",
        "_ddp_params_and_buffers_to_ignore": "names that a model asks DDP to ignore",
        "_set_static_graph": "overridden: programs set it",
    },
    "torch.distributed.ProcessGroup": {
        "_allgather_base": "an older name of all_gather_single, which torch calls still",
        "_device_types": "the devices of a group",
        "_get_backend": "the backend for a device",
        "_get_sequence_number_for_group": "overridden: torch asks for the number of calls",
        "_reduce_scatter_base": "an older name of reduce_scatter_single",
        "_register_backend": "makes a group of Gloo's or NCCL's backend",
        "_set_default_backend": "the same",
        "_set_group_desc": "torch tells a group its description",
        "_set_group_name": "torch tells a group its name",
    },
    "torch.distributed.Backend": {
        "_plugins": "how backends of others are made, such as those for NPUs",
    },
    "torch._C._distributed_c10d.Backend.Options": {
        "_timeout": "how long NCCL waits",
    },
    "torch.distributed.ProcessGroupGloo": {
        "_Options": "how it is told the addresses to listen at",
        "_set_default_timeout": "torch calls it to set a group's timeout",
        "_set_sequence_number_for_group": "torch calls it before the first collective of a backend",
    },
    "torch.distributed.ProcessGroupGloo._Options": {
        "_devices": "the addresses to listen at",
        "_threads": "as many for each of them as torch has",
        "_timeout": "as the constructor is told it",
    },
    "torch.distributed.Work": {
        "_source_rank": "the sender of a received message",
    },
}
