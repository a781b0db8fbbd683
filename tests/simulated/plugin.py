"""A plugin of pytest: leaves out what a simulated device can't do, by name."""

from __future__ import annotations

import pytest

NO_SPARSE = "a simulated device has no sparse tensors"
NO_LSTM = "a simulated device has no fused cell of an LSTM"
PROCESSES = "tests/gpu/test_data_parallel_processes.py"
# By the beginnings of names, without parameters.
LEFT_OUT = {
    "tests/gpu/test_data_parallel.py::TestResults::test_sparse_gradients": NO_SPARSE,
    **{
        f"{PROCESSES}::{name}": NO_SPARSE
        for name in (
            "test_courses_are_those_of_the_module_alone",
            "test_parameters_stay_where_they_are",
            "test_memory_is_not_left_behind",
            "test_micro_batches",
        )
    },
    f"{PROCESSES}::test_a_tensor_that_is_no_parameter_and_one_whose_memory_moves": NO_LSTM,
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if reason := LEFT_OUT.get(item.nodeid.partition("[")[0]):
            item.add_marker(pytest.mark.skip(reason=reason))
