"""DistributedDataParallel's tests that do not run on GradientSharing, and why.

`run.py --write-docs` publishes them. Patterns of test names (fnmatch); of several that fit a test
the first counts.
"""

from __future__ import annotations

_GPU = "Needs a GPU: torch has this for CUDA alone."
_HOOKS = (
    "Refused by name (`NotImplementedError`): hooks work on the reducer's buckets, of which there "
    "are none; gradients travel compressed with `codec=`."
)
_BUFFER_HOOKS = "Needs `_register_buffer_comm_hook`, a private method."
_PRIVATE = "Looks into private parts of DistributedDataParallel: its reducer, buckets and logger."
_NO_ERROR = (
    "Expects an error for parameters that a backward did not reach, or for a graph that changed "
    "under `static_graph=True`; here both are right without any option."
)
_KEYWORD = "Asks for a keyword that is refused by name (`NotImplementedError`)."
_SPARSE = "Sparse gradients are refused by name (`RuntimeError`): buckets are dense memory."

SKIPS = {
    # torch/testing/_internal/distributed/distributed_test.py
    "test_DistributedDataParallel_SyncBatchNorm*": _GPU,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _GPU,
    "test_ddp_device": _GPU,
    "test_ddp_uneven_inputs": (
        "Its convolutions over a million pixels take a CPU half a minute a step; "
        "`tests/python/share` has the same cases with small models."
    ),
    "test_post_localSGD_optimizer_parity_with_hierarchical_sgd*": "Needs four ranks.",
    "test_accumulate_gradients_no_sync_allreduce_*hook": _HOOKS,
    "test_ddp_hook_parity_*": _HOOKS,
    "test_ddp_python_error_logged": _HOOKS,
    "test_ddp_comm_hook_logging": _HOOKS,
    "test_ddp_broadcast_buffer_via_hook": _BUFFER_HOOKS,
    "test_ddp_buffer_hook_allreduce*": _BUFFER_HOOKS,
    "test_ddp_apply_optim_in_backward*": (
        "Refused by name (`NotImplementedError`): the optimizer would step on gradients that are "
        "not shared yet."
    ),
    "test_ddp_native_mixed_precision_*": _KEYWORD,
    "test_ddp_bucket_cap_mb_list": _KEYWORD,
    "test_ddp_device_mesh_initialization": _KEYWORD,
    "test_skip_all_reduce_unused_parameters": _KEYWORD,
    "test_ddp_broadcast_buffers_deprecation_warning": (
        "`broadcast_buffers` and `forward_sync_buffers` are both taken, without a warning."
    ),
    "test_ddp_control_flow_*_across_ranks": _PRIVATE,
    "test_detect_ddp_is_actually_static": _PRIVATE,
    "test_different_graph_across_ranks": _PRIVATE,
    "test_ddp_build_debug_param_to_name_mapping*": _PRIVATE,
    "test_ddp_logging_data_*": _PRIVATE,
    "test_ddp_remove_autograd_hooks": _PRIVATE,
    "test_ddp_sink_noclone": _PRIVATE,
    "test_ddp_compile_static_graph": _PRIVATE,
    "test_get_data_parallel_params": _PRIVATE,
    "test_sync_bn_logged": _PRIVATE,
    "test_ddp_profiling_torch_profiler": (
        "Counts `gloo:all_reduce` in a profile; gradients travel by an exchange of our own."
    ),
    "test_ddp_multiple_nested_unused_params_err*": _NO_ERROR,
    "test_ddp_unused_params_rebuild_buckets_exception": _NO_ERROR,
    "test_invalid_static_graph": _NO_ERROR,
    "test_static_graph_api_cpu": _NO_ERROR,
    # test/distributed/test_c10d_gloo.py and test_c10d_common.py
    "test_ddp_comm_hook_*": _HOOKS,
    "test_ddp_invalid_comm_hook_*": _HOOKS,
    "test_sparse_gradients*": _SPARSE,
    "test_sync_batch_norm_*": _GPU,
    "test_ddp_checkpointing_unused_params_use_reentrant_True": _NO_ERROR,
    "test_ddp_checkpointing_twice_use_reentrant_True": _NO_ERROR,
    "test_gloo_backend_[24]gpu_module": "Needs more than one GPU per rank.",
}
