"""In which of torch's tests lockstep's DistributedDataParallel differs on purpose, and why."""

from __future__ import annotations

from tests.conformance.differences import Difference, Differences

_UNUSED = "parameters may be unused at any time, which is no error"
_STATIC = "a graph may change, and may be promised to be static at any time"
_LOGGED = "what it tells of itself is other facts, under other names"
_INSIDES = "asks for insides of torch's reducer"
_WORDING = "the same error, of the same class, in other words"
_CPU = "it asks for what a CPU in the place of a GPU has not"

DIFFERENCES = Differences(
    on_purpose={
        "test_ddp_broadcast_buffers_deprecation_warning": Difference(
            "broadcast_buffers is not deprecated: it takes policies",
            ("line 29: AssertionError: 0 not greater than 0",),
        ),
        "test_ddp_buffer_hook_allreduce": Difference(
            "a hook of buffers runs with the backward, wherever it was to run",
            (
                "line 4 of _verify_buffers_equal(): AssertionError: Tensor-likes are not close! "
                "Mismatched elements: 2 / 2 (100.0%) Greatest absolute difference: 0.98554",
            ),
        ),
        "test_ddp_build_debug_param_to_name_mapping": Difference(
            _INSIDES,
            (
                "line 10: AttributeError: 'TwoLinLayerNet' object has no attribute "
                "'_build_params_for_reducer'",
            ),
        ),
        "test_ddp_build_debug_param_to_name_mapping_requires_grad": Difference(
            _INSIDES,
            ("line 25: AttributeError: 'Net' object has no attribute '_build_params_for_reducer'",),
        ),
        "test_ddp_comm_hook_logging": Difference(
            _LOGGED,
            (
                "line 42: AssertionError: String comparison failed: 'allreduce_hook' != "
                "'BuiltinCommHookType.ALLREDUCE'",
            ),
        ),
        "test_ddp_control_flow_different_across_ranks": Difference(
            _INSIDES,
            (
                "line 46: AttributeError: 'types.SimpleNamespace' object has no attribute "
                "'_get_local_used_map'",
            ),
        ),
        "test_ddp_control_flow_same_across_ranks": Difference(
            _INSIDES,
            (
                "line 26: AttributeError: 'types.SimpleNamespace' object has no attribute "
                "'_get_local_used_map'",
            ),
        ),
        "test_ddp_device_mesh_initialization": Difference(
            _WORDING, ('line 21: AssertionError: "Cannot specify both',)
        ),
        "test_ddp_logging_data_cpu": Difference(
            _LOGGED,
            (
                "line 17 of _test_ddp_logging_data(): AttributeError: 'Net' object has no "
                "attribute '_set_ddp_runtime_logging_sample_rate'",
            ),
        ),
        "test_ddp_multiple_nested_unused_params_err_ignore_params": Difference(
            _UNUSED,
            (
                "line 114 of _test_ddp_multiple_nested_unused_params_error(): AssertionError: "
                "False is not true",
            ),
        ),
        "test_ddp_multiple_nested_unused_params_error": Difference(
            _UNUSED,
            (
                "line 114 of _test_ddp_multiple_nested_unused_params_error(): AssertionError: "
                "False is not true",
            ),
        ),
        "test_ddp_native_mixed_precision_ignored_params": Difference(
            _INSIDES, ("line 31: AttributeError: 'Parameter' object has no attribute '_mp_param'",)
        ),
        "test_ddp_profiling_torch_profiler": Difference(
            "the profiler sees no DistributedDataParallel.forward, and other collectives",
            (
                "line 78 of _test_ddp_profiling(): AssertionError: Scalars are not equal! "
                "Expected 1 but got 0.",
                "line 37 of _test_ddp_profiling(): AssertionError: Scalars are not equal! "
                "Expected 6 but got 0.",
            ),
        ),
        "test_ddp_python_error_logged": Difference(
            _WORDING, ('line 16: AssertionError: "must be callable"',)
        ),
        "test_ddp_sync_module_states": Difference(
            _INSIDES,
            ("line 36: AttributeError: 'Linear' object has no attribute 'broadcast_bucket_size'",),
        ),
        "test_ddp_unused_params_rebuild_buckets_exception": Difference(
            _UNUSED, ("line 45: AssertionError: True is not false",)
        ),
        "test_detect_ddp_is_actually_static": Difference(
            _INSIDES,
            (
                "line 35: AttributeError: 'types.SimpleNamespace' object has no attribute "
                "'_ddp_graph_static'",
            ),
        ),
        "test_different_graph_across_ranks": Difference(
            _LOGGED, ("line 10: AssertionError: 0 is not true",)
        ),
        "test_invalid_static_graph": Difference(
            _STATIC, ("line 14: AssertionError: RuntimeError not raised",)
        ),
        "test_skip_all_reduce_unused_parameters": Difference(
            _LOGGED, ("line 12: AssertionError: None mismatch: None is not 2",)
        ),
        "test_static_graph_api_cpu": Difference(
            _STATIC, ("line 6: AssertionError: RuntimeError not raised",)
        ),
    },
    untestable={
        "test_DistributedDataParallel_SyncBatchNorm_half": Difference(
            _CPU,
            ("line 14: RuntimeError: Cannot access accelerator device when none is available.",),
        ),
        "test_ddp_device": Difference(
            _CPU,
            ("line 3 of tuple_and_list_validator(): AssertionError: None mismatch: None is not",),
        ),
        "test_ddp_hook_parity_post_localSGD": Difference(
            _CPU,
            (
                "line 39 of _test_ddp_hook_parity(): ValueError: Default group size only takes "
                "effect when CUDA is available.",
            ),
        ),
        "test_ddp_hook_pickling_powerSGD": Difference(
            "torch.load() refuses what the test has saved",
            ("line 45 of _test_hook_pickling(): UnpicklingError: Weights only load failed.",),
        ),
        "test_ddp_logging_data_gpu": Difference(
            _LOGGED,
            (
                "line 17 of _test_ddp_logging_data(): AttributeError: 'Net' object has no "
                "attribute '_set_ddp_runtime_logging_sample_rate'",
            ),
        ),
        "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": Difference(
            _INSIDES,
            (
                "line 40 of _test_ddp_native_mixed_precision(): AttributeError: 'Parameter' "
                "object has no attribute '_mp_param'",
            ),
        ),
        "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": Difference(
            _INSIDES,
            (
                "line 40 of _test_ddp_native_mixed_precision(): AttributeError: 'Parameter' "
                "object has no attribute '_mp_param'",
            ),
        ),
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": Difference(
            _INSIDES,
            (
                "line 40 of _test_ddp_native_mixed_precision(): AttributeError: 'Parameter' "
                "object has no attribute '_mp_param'",
            ),
        ),
        "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": Difference(
            _INSIDES,
            (
                "line 40 of _test_ddp_native_mixed_precision(): AttributeError: 'Parameter' "
                "object has no attribute '_mp_param'",
            ),
        ),
        "test_ddp_uneven_inputs": Difference(
            _INSIDES,
            (
                "line 86 of _run_uneven_inputs_test(): AttributeError: 'BatchNormNet' object has "
                "no attribute '_authoritative_rank'",
            ),
        ),
        "test_ddp_uneven_inputs_stop_iteration_sync_bn": Difference(
            _WORDING,
            (
                'line 47: AssertionError: "Detected at least',
                'line 47: AssertionError: "Rank 1 exhausted',
            ),
        ),
    },
)
