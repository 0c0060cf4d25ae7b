"""What alerts rest on, as a run really produces it: values that a rule waits for must be values that come."""

from collections.abc import Mapping
from pathlib import Path

from support.loop.local_fleet import QuietReporter
from support.servers.scrapes import scrape, value_of
from support.servers.served_run import drive_config

from orchestrator.config import parse_config
from orchestrator.exporters.prometheus import Exporter

ETA, STEPS = 2, 30


class Rows(QuietReporter):
    """Keeps every row."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def step(self, row: Mapping[str, float], steps: int) -> None:
        self.rows.append(dict(row))


def driven(folder: Path, latency_s: float, sigma: float) -> tuple[list[dict[str, float]], float]:
    """Rows of a run whose trainer is the slower part, and its groups that were rejected as stale."""
    config = parse_config(
        {
            "run": {"dir": str(folder), "name": "run", "steps": STEPS, "batch_groups": 4, "group_size": 2},
            "engine": {"type": "scripted", "replicas": 2, "latency_mean_s": latency_s, "latency_sigma": sigma},
            "trainer": {"type": "scripted", "scripted_step_s": 0.04},
            "staleness": {"max_staleness": ETA},
            "consistency": {"mode": "off"},
        },
        "test",
    )
    reporter = Rows()
    with Exporter("127.0.0.1", 0) as exporter:
        drive_config(config, exporter, reporter=reporter)
        stale = value_of(scrape(exporter.url), "concord_rejected_groups_total", reason="stale")
    return reporter.rows[STEPS // 3 :], stale


def at_limit(rows: list[dict[str, float]], stale: float) -> bool:
    """ConcordStalenessAtLimit, over these rows."""
    mean = sum(row["token_staleness_mean"] for row in rows) / len(rows)
    return max(row["token_staleness_max"] for row in rows) >= ETA and mean > 0.5 * ETA and stale > 0


def test_a_run_that_loses_old_groups_looks_as_the_alert_on_staleness_has_it(tmp_path: Path):
    """A few answers take far longer than the others: what comes late is too old."""
    rows, stale = driven(tmp_path, 0.02, 1.5)
    assert max(row["token_staleness_max"] for row in rows) == ETA, "no trained token is ever older"
    assert at_limit(rows, stale)


def test_a_run_whose_trainer_is_slow_trains_at_the_limit_and_loses_nothing(tmp_path: Path):
    rows, stale = driven(tmp_path, 0.0, 0.0)
    assert sum(row["token_staleness_mean"] for row in rows) > 0.8 * ETA * len(rows)
    assert not at_limit(rows, stale)
