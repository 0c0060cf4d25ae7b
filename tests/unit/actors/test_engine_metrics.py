"""An engine that keeps metrics of its own has an address for Prometheus; any other has none."""

import urllib.request

import pytest

from actors.roles.engine_metrics import serve_engine_metrics
from rollout.config import EngineConfig, ScriptedConfig, TorchEngineConfig, VllmConfig
from rollout.errors import UserError


def test_what_the_process_keeps_is_served_on_a_port_of_its_own():
    address = serve_engine_metrics(VllmConfig(serve_metrics=True), "127.0.0.1")
    assert address.startswith("127.0.0.1:")
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10.0) as answer:
        assert b"process_cpu_seconds_total" in answer.read()


def test_a_host_that_is_no_address_of_the_node_is_told_with_the_cure():
    with pytest.raises(UserError, match=r"on 192\.0\.2\.1: .*set exporter\.host to an address of every node"):
        serve_engine_metrics(VllmConfig(serve_metrics=True), "192.0.2.1")


@pytest.mark.parametrize(
    "engine", [VllmConfig(), TorchEngineConfig(), ScriptedConfig()], ids=lambda engine: engine.type
)
def test_an_engine_without_metrics_has_no_address(engine: EngineConfig):
    assert serve_engine_metrics(engine, "127.0.0.1") == ""
