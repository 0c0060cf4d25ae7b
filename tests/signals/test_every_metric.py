"""Real runs of small models under one Prometheus: by their end every metric had a value and every panel data, within
the declared numbers of series."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.loop.local_run import drive_to_its_end
from support.servers.grafana_panels import dashboard_files, may_be_empty, panels_of, queries_of
from support.servers.prometheus_rules import rules
from support.servers.prometheus_server import PrometheusServer
from support.servers.scrapes import series_by_metric
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.harness.rehearsal_cases import Case, document, model_of
from orchestrator.config import RunConfig, parse_config
from orchestrator.exporters.prometheus import Exporter
from orchestrator.metrics.catalogue import CATALOGUE, DECLARED, sizes_of
from rollout.types.prompts import Prompt
from rollout.types.trajectory import Reward, Trajectory

STEPS = 6
BLOCKS, HEADS = 8, 8
"""More than the models of these runs have, embeddings and head counted."""


def reward_in_parts(prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
    ids = trajectory.token_ids[trajectory.sampled]
    even, low = float((ids % 2 == 0).mean()), float((ids < 8).mean())
    return Reward(total=(even + low) / 2, parts=(("even", even), ("low", low)))


reward_in_parts.needs_text = False  # pyright: ignore[reportFunctionMemberAccess]


def llama_of(tiny: Path, folder: Path) -> Path:
    """A random Llama, which has no QK-norm, with the tiny model's tokenizer and vocabulary."""
    shape: dict[str, Any] = {
        name: getattr(AutoConfig.from_pretrained(tiny), name)
        for name in ("vocab_size", "eos_token_id", "pad_token_id", "bos_token_id")
    }
    shape |= {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    LlamaForCausalLM(LlamaConfig(**shape, max_position_embeddings=512, initializer_range=0.3)).save_pretrained(folder)
    return folder


def configs(folder: Path) -> list[RunConfig]:
    """A run with nothing switched on, but that every group is audited, of so few; a mixture of experts with everything
    that a gate, a reference, replayed routing and probes bring; and a Llama under QK-Clip."""
    mixture = Case(fault=None, causes=(), experts=2)
    tiny = model_of(Case(fault=None, causes=()), 0, folder)
    everything: dict[str, dict[str, Any]] = {
        "run": {"steps": STEPS, "group_size": 4, "batch_groups": 4},
        "reward": {"type": "python", "function": f"{__name__}:{reward_in_parts.__name__}"},
        "trainer": {
            "replay_routing": True,
            "algorithm": {"type": "grpo", "kl_coef": 0.01},
            "optimizer": {"learning_rate": 3e-3, "clip": {"type": "adagc", "warmup_steps": 2}},
            "probes": {"update_ratio": True, "activations": True, "router_load": True},
        },
        "evaluation": {"every_steps": 2, "prompts": 4},
    }
    qk_clip: dict[str, dict[str, Any]] = {"run": {"steps": 3}, "trainer": {"optimizer": {"qk_clip": {"enabled": True}}}}
    plain = document(Case(fault=None, causes=()), 0, tiny, folder / "plain")
    return [
        merged(
            plain,
            {
                "run": {"steps": STEPS},
                "engine": {"replicas": 1},
                "consistency": {"mode": "audit", "audit_fraction": 1.0},
            },
        ),
        merged(document(mixture, 0, model_of(mixture, 0, folder), folder / "mixture"), everything),
        merged(
            document(Case(fault=None, causes=()), 0, llama_of(tiny, folder / "llama-model"), folder / "llama"), qk_clip
        ),
    ]


def merged(base: dict[str, dict[str, Any]], changes: dict[str, dict[str, Any]]) -> RunConfig:
    return parse_config(
        {**base, **{section: base.get(section, {}) | keys for section, keys in changes.items()}}, "test"
    )


def drive_and_scrape(config: RunConfig, exporter: Exporter, prometheus: PrometheusServer) -> None:
    """A run to its end, with the last step scraped."""
    drive_to_its_end(config, exporter=exporter, deadline_s=250.0)
    applied = f'concord_steps_total{{outcome="applied", instance="{exporter.target}"}}'
    prometheus.wait_until(lambda: prometheus.value(applied) == config.run.steps, "the last step to be scraped")
    prometheus.wait_until(
        lambda: (prometheus.value(f"count_over_time({applied}[1m])") or 0.0) >= 3.0, "enough scrapes for a rate"
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_declared_metric_has_a_value_by_the_end(tmp_path: Path):
    runs = configs(tmp_path)
    targets = [config.run.dir / ".prometheus" / "*.json" for config in runs]
    with PrometheusServer(tmp_path / "prometheus", targets) as prometheus:
        found, answered = set[str](), set[str]()
        filled = [panel for file in dashboard_files() for panel in panels_of(file) if not may_be_empty(panel)]
        panels = list(dict.fromkeys(query for panel in filled for query in queries_of(panel, "run")))
        asked = [*panels, *(rule["expr"] for rule in rules("recording"))]
        for config in runs:
            with Exporter("127.0.0.1", 0) as exporter:
                drive_and_scrape(config, exporter, prometheus)
                if config is runs[0]:  # before the others: what they leave in the last minute is none of it
                    assert not empty_panels(prometheus, exporter, folded=False), "panels that no option fills"
                found |= metrics_within_bounds(prometheus, config, exporter)
                answered |= prometheus.answered(asked, exporter.target)
        assert not sorted(metric.name for metric in CATALOGUE if metric.name not in found)
        assert not [query for query in asked if query not in answered]
        for rule in rules("alerts"):
            prometheus.query(rule["expr"])


def empty_panels(prometheus: PrometheusServer, exporter: Exporter, *, folded: bool) -> list[str]:
    """Panels of which no query has data, but for those that have words for that."""
    panels = [panel for file in dashboard_files() for panel in panels_of(file, folded=folded)]
    asked = {panel["title"]: queries_of(panel, "run") for panel in panels if not may_be_empty(panel)}
    found = prometheus.answered([query for queries in asked.values() for query in queries], exporter.target)
    return [title for title, queries in asked.items() if queries and not found.intersection(queries)]


def metrics_within_bounds(prometheus: PrometheusServer, config: RunConfig, exporter: Exporter) -> set[str]:
    """The metrics of one run, each of which has at most as many series as its sizes allow."""
    series = prometheus.series(f'{{__name__=~"concord_.*", instance="{exporter.target}"}}')
    counts = series_by_metric(one["__name__"] for one in series)
    sizes = sizes_of(config, blocks=BLOCKS, heads=HEADS)
    assert not {
        name: (count, DECLARED[name].max_series(sizes))
        for name, count in counts.items()
        if count > DECLARED[name].max_series(sizes)
    }
    assert json.loads((config.run.dir / "run" / "summary.json").read_text())["metrics_url"] == exporter.url
    return set(counts)
