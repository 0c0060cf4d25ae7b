"""vLLM's own metrics, from an actor of a real run on Ray to Prometheus, which finds the endpoint in the run's
folder."""

import contextlib
import json
import signal
from pathlib import Path

import pytest
from contracts.source_tree import ROOT
from support.loop.concord_process import MODEL, START_S, STEP_S, ConcordProcess
from support.servers.prometheus_server import PrometheusServer

VLLM_START_S = 240.0
SETTINGS = {
    "run.steps": 5000,
    "model.type": "local",
    "model.path": str(MODEL),
    "engine.serve_metrics": True,
    "run.name": "run",
}


@pytest.mark.slow
@pytest.mark.timeout(START_S + VLLM_START_S + 4 * STEP_S)
def test_prometheus_finds_the_metrics_of_an_engine_through_the_folder_of_its_run(tmp_path: Path):
    settings = {**SETTINGS, "run.dir": str(tmp_path)}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    targets = tmp_path / ".prometheus" / "run.json"
    process = ConcordProcess("run", ROOT / "examples" / "quickstart.toml", *options, folder=tmp_path)
    with contextlib.closing(process), PrometheusServer(tmp_path / "prometheus", [targets]) as prometheus:
        process.until_step(2, START_S + VLLM_START_S)
        sampled = 'vllm:generation_tokens_total{job="concord-engine", run="run", replica="0"}'
        prometheus.wait_until(lambda: (prometheus.value(sampled) or 0.0) > 0.0, "tokens that vLLM has counted", STEP_S)
        prometheus.wait_until(
            lambda: prometheus.value('count(up{run="run"} == 1)') == 2.0, "the driver beside the engine", STEP_S
        )
        process.signal(signal.SIGTERM)
        assert process.exit_status() == 0, process.errors
        assert not targets.exists()
