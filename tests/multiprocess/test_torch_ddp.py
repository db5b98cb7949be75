"""PyTorch's own tests of its DistributedDataParallel pass with Poseidon's class in its place.

They come from torch's wheel and run on CPU (``torch_ddp_tests.py``). A test that torch's class passes here must pass,
but for those that look inside torch's C++, named below with the reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import torch_ddp_tests
from ranks import RankError, run_ranks

INSIDE_TORCH = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": "passes model.logger to C++",
    "test_ddp_build_debug_param_to_name_mapping": "calls the reducer's set-up, _build_params_for_reducer",
    "test_ddp_build_debug_param_to_name_mapping_requires_grad": "calls the reducer's set-up",
    "test_ddp_control_flow_different_across_ranks": "reads reducer._get_local_used_map",
    "test_ddp_control_flow_same_across_ranks": "reads reducer._get_local_used_map",
    "test_ddp_logging_data_cpu": "reads what the C++ logger recorded",
    "test_ddp_profiling_autograd_profiler": "counts the all-reduces that C++ issues in the backward's own thread",
    "test_ddp_profiling_torch_profiler": "counts the all-reduces that C++ issues in the backward's own thread",
    "test_ddp_python_error_logged": "reads what the C++ logger recorded",
    "test_detect_ddp_is_actually_static": "reads reducer._ddp_graph_static",
    "test_different_graph_across_ranks": "asks the C++ logger whether buckets were rebuilt",
    "test_skip_all_reduce_unused_parameters": "asks the C++ logger how many buckets were reduced",
    "test_ddp_native_mixed_precision_ignored_params": "torch's private mixed_precision, refused in favour of autocast",
}
"""Tests that torch's class passes on CPU and Poseidon's cannot."""

NEEDS_GPU = {
    "test_DistributedDataParallel_SyncBatchNorm": "SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": "SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": "SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": "SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": "SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": "SyncBatchNorm",
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": "SyncBatchNorm",
    "test_DistributedDataParallel_non_default_stream": "streams",
    "test_ddp_device": "looks at device numbers",
    "test_ddp_device_mesh_initialization": "a mesh of GPUs",
    "test_ddp_has_finalized": "NCCL's errors",
    "test_ddp_hook_pickling_powerSGD": "torch skips it",
    "test_ddp_inference": "SyncBatchNorm",
    "test_ddp_logging_data_gpu": "looks at device numbers",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_no_set_grad_none": "events",
    "test_ddp_native_mixed_precision_grad_as_bucket_view_set_grad_to_none": "events",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_no_set_grad_none": "events",
    "test_ddp_native_mixed_precision_no_grad_as_bucket_view_set_grad_to_none": "events",
    "test_ddp_profiling_execution_trace": "NCCL's events",
    "test_ddp_sync_bn_training_vs_eval": "SyncBatchNorm",
    "test_ddp_uneven_inputs": "convolutions that take minutes on a CPU",
    "test_sync_bn_logged": "SyncBatchNorm",
}
"""Tests that torch's class does not pass on CPU."""

_TOGETHER = 20
"""Tests that one team runs in a row."""

NAMES = [name for name in torch_ddp_tests.ddp_tests() if name not in INSIDE_TORCH and name not in NEEDS_GPU]
_outcomes: dict[str, str] = {}
"""What is known so far: by test, the error's text or nothing."""


@pytest.mark.parametrize("name", NAMES)
def test_passes_as_with_torchs_own_class(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if name not in _outcomes:
        selected = [item.callspec.params["name"] for item in request.session.items if item.path == request.path]
        left = [other for other in selected if other not in _outcomes]
        _run(left[left.index(name) :][:_TOGETHER], tmp_path)
    assert not _outcomes[name], _outcomes[name]


def _run(names: list[str], folder: Path) -> None:
    """Run tests in a row, up to the first that fails; what comes after it is left to a new team."""
    try:
        run_ranks(
            torch_ddp_tests.run_tests,
            torch_ddp_tests.WORLD_SIZE,
            names,
            False,
            folder,
            env=torch_ddp_tests.ENVIRONMENT,
            preload=[torch_ddp_tests.MODULE],
        )
    except RankError as error:
        culprit = torch_ddp_tests.last_begun(folder, names)
        _outcomes.update(dict.fromkeys(names[: names.index(culprit)], ""))
        _outcomes[culprit] = str(error)
    else:
        _outcomes.update(dict.fromkeys(names, ""))
