"""Starts vLLM's AsyncLLM for one replica: environment, arguments, and the errors of a failed start with their cure.

It knows no request. The environment is set before vllm is imported; what concerns the child process only is taken back
after the launch.
"""

import gc
import json
import os
import re
import threading
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.config import VllmConfig
from rollout.engines.vllm.requests import MOST_LOGPROBS
from rollout.errors import ConcordError, EngineError, UserError
from rollout.published.digests import json_digest
from rollout.types.engine_identity import EngineIdentity

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

EXTENSION = "rollout.engines.vllm.worker_extension.ConcordWorkerExtension"
SCHEDULERS = {
    True: "rollout.engines.vllm.scheduler.CanaryScheduler",
    False: "rollout.engines.vllm.scheduler.AsyncCanaryScheduler",
}
"""On CPU, and on GPU."""
_GIB = 1024**3
_LAUNCH = threading.Lock()
"""The environment belongs to the process: one launch at a time."""
_ERROR_LINE = re.compile(r"^\s*(?:\S+\.)?(\w+(?:Error|Exception|Exit|Interrupt)): (.+)$")


def quiet_vllm() -> None:
    """No usage statistics, no INFO logs. To be called before vllm is imported."""
    os.environ.update(VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_LOGGING_LEVEL="ERROR")


def check_model_config(directory: Path) -> None:
    """What vLLM's child process would otherwise report only in its log.

    Raises:
        UserError: there is no readable config.json.
    """
    try:
        json.loads((directory / "config.json").read_bytes())
    except OSError as error:
        raise UserError(
            f"model directory {directory}: config.json cannot be read ({error.strerror}); expected a complete Hugging "
            "Face model"
        ) from error
    except ValueError as error:
        raise UserError(
            f"model directory {directory}: config.json is not JSON ({error}); save the model again"
        ) from error


def core_of(config: VllmConfig, identity: EngineIdentity) -> int | None:
    """The CPU that this replica computes on, or None where vLLM chooses: from `cpu_bind_from` on, round the cores that
    this process may use."""
    if config.cpu_bind_from is None or config.tensor_parallel_size > 1:
        return None
    cores = sorted(os.sched_getaffinity(0))
    return cores[(config.cpu_bind_from + identity.replica) % len(cores)]


def child_environment(core: int | None) -> dict[str, str | None]:
    """Variables of the engine core on CPU; None takes one away.

    A bound replica runs scheduler and model in one process with one compute thread: vLLM's default of a second process
    costs half as much CPU again. Sizes come from the config alone, so vLLM's own variables for them are taken away.
    """
    environment: dict[str, str | None] = {"VLLM_CPU_KVCACHE_SPACE": None, "VLLM_CPU_OMP_THREADS_BIND": None}
    # oneDNN keeps a compiled primitive for every batch shape, by default 1,024 of them: hundreds of MiB that seem to
    # leak for hundreds of steps.
    environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = os.environ.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    if core is not None:
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "GOMP_CPU_AFFINITY": str(core)}
    return environment


def engine_arguments(model: str, config: VllmConfig, identity: EngineIdentity, *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of `AsyncEngineArgs`. Ids go in and out: no tokenizer is loaded.

    Prefixes are shared on GPU only (on CPU the hashing costs more than short prompts give back), and only where every
    weight update clears the cache (`recompute`): under `keep`, a new request could otherwise start from KV that older
    weights wrote.
    """
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": config.dtype,
        "max_model_len": config.max_model_len,
        "seed": int(json_digest([identity.seed, identity.replica])[:7], 16),
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_num_seqs": config.max_num_seqs + 1,  # the last place is the canary's
        "scheduler_cls": SCHEDULERS[on_cpu],
        "async_scheduling": not on_cpu,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MOST_LOGPROBS,
        "scheduling_policy": "priority",
        "enable_prefix_caching": not on_cpu and config.kv_across_versions == "recompute",
        "tensor_parallel_size": config.tensor_parallel_size,
        "enforce_eager": config.enforce_eager,
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": not config.serve_metrics,
        "enable_log_requests": False,
        "enable_return_routed_experts": config.return_routing or None,
    }
    if on_cpu:
        arguments["kv_cache_memory_bytes"] = int(config.kv_cache_gib * _GIB)
    else:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if on_cpu and core_of(config, identity) is not None:
        arguments["distributed_executor_backend"] = "uni"
    return {name: value for name, value in arguments.items() if value is not None}


def launch(model: str, config: VllmConfig, identity: EngineIdentity, scratch: Path) -> "AsyncLLM":
    """Start the engine core; blocks for tens of seconds. Call it in a thread.

    Args:
        model: directory in Hugging Face layout.
        scratch: an existing directory for the core's own error log.

    Raises:
        UserError: model and config do not fit together or the machine; the message holds the cure.
        EngineError: the core did not start for another reason.
    """
    check_model_config(Path(model))
    log = scratch / "core.log"
    quiet_vllm()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = current_platform.is_cpu()
    variables = child_environment(core_of(config, identity)) if on_cpu else {}
    with _LAUNCH, _environment(variables):
        try:
            arguments = AsyncEngineArgs(
                **engine_arguments(model, config, identity, on_cpu=on_cpu),
                log_config_file=str(_log_config(scratch, log)),
            )
            return AsyncLLM.from_engine_args(arguments)
        except (ValueError, RuntimeError, OSError, MemoryError, TimeoutError) as error:
            # The traceback holds half a client and its sockets; what happened is in the core's log, whose last error is
            # reported.
            failure = explain(f"{type(error).__name__}: {error}", root_cause(log), config)
            error.with_traceback(None)
            gc.collect()
            raise failure from error


def root_cause(log: Path) -> str:
    """The last error that the engine core wrote, or an empty string."""
    if not log.exists():
        return ""
    matches = [
        match
        for line in log.read_text(errors="replace").splitlines()
        if (match := _ERROR_LINE.match(line.split("] ", 1)[-1]))
    ]
    return f"{matches[-1][1]}: {matches[-1][2]}" if matches else ""


def explain(error: str, root: str, config: VllmConfig) -> ConcordError:
    """A failed start as the error to raise: what failed, and what to change."""
    text = f"{root} {error}"
    why = root or error
    if (
        "max_model_len" in text
        and ("greater than the derived" in text or "larger than" in text)
        and "KV cache" not in text
    ):
        return UserError(
            f"engine.max_model_len = {config.max_model_len} is more than the model was built for ({why}); lower it or "
            "leave it out"
        )
    if "KV cache" in text or "kv cache" in text or "cache blocks" in text:
        knobs = (
            f"engine.kv_cache_gib = {config.kv_cache_gib} (on GPU: engine.gpu_memory_utilization = "
            f"{config.gpu_memory_utilization})"
        )
        return UserError(f"the KV cache does not fit: {why}; change {knobs}, or lower engine.max_model_len")
    if "out of memory" in text.lower() or "MemoryError" in text or "can't allocate memory" in text:
        return EngineError(
            f"vLLM ran out of memory while starting: {why}; lower engine.kv_cache_gib or engine.max_num_seqs, or give "
            "it a larger machine"
        )
    return EngineError(f"vLLM did not start: {why}")


def _log_config(scratch: Path, log: Path) -> Path:
    path = scratch / "logging.json"
    core = {"class": "logging.FileHandler", "filename": str(log), "delay": True, "level": "ERROR", "formatter": "plain"}
    stderr = {"class": "logging.StreamHandler", "level": "CRITICAL", "formatter": "plain"}
    settings = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s %(message)s"}},
        "handlers": {"core": core, "stderr": stderr},
        "loggers": {"vllm": {"handlers": ["core", "stderr"], "level": "ERROR", "propagate": False}},
    }
    path.write_text(json.dumps(settings))
    return path


@contextmanager
def _environment(variables: Mapping[str, str | None]) -> Generator[None]:
    """Apply `variables`; afterwards the environment is as before, also where vLLM itself changed it for its children
    (LD_PRELOAD, ...)."""
    before = dict(os.environ)
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    try:
        yield
    finally:
        for name in set(os.environ) - set(before):
            del os.environ[name]
        os.environ.update(before)
