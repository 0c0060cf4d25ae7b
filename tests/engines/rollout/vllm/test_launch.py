"""What a replica's config turns into before vLLM starts, and what a failed start says. No engine is started."""

import os
from pathlib import Path

import pytest

from rollout.config import SamplingConfig, VllmConfig
from rollout.engines.vllm.launch import child_environment, core_of, engine_arguments, explain, root_cause
from rollout.errors import EngineError, UserError
from rollout.types.engine_identity import EngineIdentity


def identity(replica: int = 0, seed: int = 1) -> EngineIdentity:
    return EngineIdentity(replica=replica, seed=seed, deterministic=False, sampling=SamplingConfig())


def test_vllm_keeps_statistics_only_where_they_are_served():
    for served in (False, True):
        assert (
            engine_arguments("m", VllmConfig(serve_metrics=served), identity(), on_cpu=True)["disable_log_stats"]
            is not served
        )


def test_replicas_compute_on_cores_of_their_own_as_long_as_there_are_some():
    cores = sorted(os.sched_getaffinity(0))
    bound = [core_of(VllmConfig(cpu_bind_from=0), identity(replica)) for replica in range(len(cores) + 1)]
    assert bound == [*cores, cores[0]]
    assert core_of(VllmConfig(cpu_bind_from=None), identity()) is None


def test_a_bound_replica_is_one_process_with_one_thread():
    environment = child_environment(3)
    assert environment["GOMP_CPU_AFFINITY"] == "3"
    assert environment["OMP_NUM_THREADS"] == "1"
    arguments = engine_arguments("m", VllmConfig(), identity(), on_cpu=True)
    assert arguments["distributed_executor_backend"] == "uni"
    assert "distributed_executor_backend" not in engine_arguments(
        "m", VllmConfig(cpu_bind_from=None), identity(), on_cpu=True
    )


def test_sizes_come_from_the_config_alone():
    environment = child_environment(None)
    assert (environment["VLLM_CPU_KVCACHE_SPACE"], environment["VLLM_CPU_OMP_THREADS_BIND"]) == (None, None)
    assert (
        engine_arguments("m", VllmConfig(kv_cache_gib=0.5), identity(), on_cpu=True)["kv_cache_memory_bytes"] == 2**29
    )
    on_gpu = engine_arguments("m", VllmConfig(gpu_memory_utilization=0.5), identity(), on_cpu=False)
    assert on_gpu["gpu_memory_utilization"] == 0.5
    assert "kv_cache_memory_bytes" not in on_gpu


def test_prefixes_are_shared_only_where_an_update_clears_the_cache():
    """Public fault 32: keys and values of older weights must not serve a newer version."""
    assert (
        engine_arguments("m", VllmConfig(kv_across_versions="recompute"), identity(), on_cpu=False)[
            "enable_prefix_caching"
        ]
        is True
    )
    assert (
        engine_arguments("m", VllmConfig(kv_across_versions="keep"), identity(), on_cpu=False)["enable_prefix_caching"]
        is False
    )
    assert engine_arguments("m", VllmConfig(), identity(), on_cpu=True)["enable_prefix_caching"] is False


def test_a_place_is_kept_for_the_canary():
    for on_cpu in (True, False):
        arguments = engine_arguments("m", VllmConfig(max_num_seqs=32), identity(), on_cpu=on_cpu)
        assert arguments["max_num_seqs"] == 33
        assert arguments["scheduler_cls"].startswith("rollout.engines.vllm.scheduler.")
        assert arguments["async_scheduling"] == ("Async" in arguments["scheduler_cls"])


def test_replicas_and_runs_draw_apart():
    seeds = {
        engine_arguments("m", VllmConfig(), identity(replica, seed), on_cpu=True)["seed"]
        for replica in range(3)
        for seed in range(3)
    }
    assert len(seeds) == 9


def test_a_failed_start_names_the_last_error_of_the_core(tmp_path: Path):
    log = tmp_path / "core.log"
    assert root_cause(log) == ""
    log.write_text(
        "2026-01-01 ERROR vllm EngineCore failed to start.\nTraceback:\n  x\nKeyError: 1\n\nValueError: no KV cache for"
        " you\n"
    )
    assert root_cause(log) == "ValueError: no KV cache for you"


@pytest.mark.parametrize(
    ("error", "kind", "cure"),
    [
        (
            "ValueError: To serve at least one request 1 GiB KV cache is needed, which is larger than max_model_len",
            UserError,
            "engine.kv_cache_gib = 1.0",
        ),
        (
            "ValidationError: User-specified max_model_len (9) is greater than the derived max_model_len",
            UserError,
            "engine.max_model_len = 9",
        ),
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory", EngineError, "lower engine.kv_cache_gib"),
        ("RuntimeError: something else", EngineError, "something else"),
    ],
)
def test_a_failed_start_says_what_to_change(error: str, kind: type[Exception], cure: str):
    raised = explain(error, "", VllmConfig(max_model_len=9))
    assert type(raised) is kind
    assert cure in str(raised)


def test_compiled_shapes_are_bounded_unless_the_user_bounds_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    assert child_environment(None)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "64"
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    assert child_environment(None)["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
