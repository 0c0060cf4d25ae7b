"""A real Prometheus scrapes a run of scripted engines while it goes on: nothing undeclared, no more series than
declared, and every rule answers."""

from pathlib import Path

import pytest
from support.loop.local_fleet import QuietReporter
from support.servers.grafana_panels import panel_queries
from support.servers.prometheus_rules import rules
from support.servers.prometheus_server import PrometheusServer
from support.servers.scrapes import scrape, series_by_metric
from support.servers.served_run import BATCH, config_of, drive_served

from orchestrator.exporters.prometheus import Exporter
from orchestrator.metrics.catalogue import DECLARED, sizes_of

STEPS = 12
APPLIED = 'concord_steps_total{outcome="applied"}'


@pytest.mark.timeout(500)
def test_prometheus_follows_a_run_and_every_rule_answers(tmp_path: Path):
    with (
        Exporter("127.0.0.1", 0) as exporter,
        PrometheusServer(tmp_path / "prometheus", [tmp_path / ".prometheus" / "run.json"]) as prometheus,
    ):

        def at_step(step: int) -> None:
            """The loop stands still meanwhile: a scrape does not need it."""
            if step == STEPS // 2:
                prometheus.wait_until(
                    lambda: (prometheus.value(APPLIED) or 0.0) >= 1.0, "a scrape while the run goes on"
                )

        reporter = QuietReporter()
        reporter.on_step = at_step
        _, summary = drive_served(tmp_path, exporter, STEPS, reporter=reporter)
        assert summary["trained"] == STEPS * BATCH
        prometheus.wait_until(lambda: prometheus.value(APPLIED) == STEPS, "the last step to be scraped")
        prometheus.wait_until(
            lambda: prometheus.value("concord_trained_groups_total") == STEPS * BATCH, "the groups of the last step"
        )
        assert_series_are_those_of_the_run(prometheus, exporter)
        for rule in (*rules("recording"), *rules("alerts")):
            prometheus.query(rule["expr"])
        assert len(prometheus.answered(panel_queries("run"), exporter.target)) > 50
        assert not [query for query in panel_queries("another run") if "(" not in query and prometheus.query(query)]


def assert_series_are_those_of_the_run(prometheus: PrometheusServer, exporter: Exporter) -> None:
    def known() -> list[dict[str, str]]:
        return prometheus.series('{job="concord", __name__=~"concord_.*"}')

    prometheus.wait_until(lambda: len(known()) >= len(scrape(exporter.url)), "every series to be scraped once")
    series = known()
    assert {one["run"] for one in series} == {"run"}
    assert len(series) == len(scrape(exporter.url))
    sizes, counts = (
        sizes_of(config_of(Path(), STEPS), blocks=0, heads=0),
        series_by_metric(one["__name__"] for one in series),
    )
    assert not {name: count for name, count in counts.items() if count > DECLARED[name].max_series(sizes)}
