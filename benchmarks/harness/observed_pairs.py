"""What observing adds to a step: pairs of the same deterministic run, one with an exporter that is scraped and one
without, which take turns step by step.

So nothing else differs, and a machine that is busy is so for both. The fleet is that of the tests: real store, episode
workers, engine and trainer in one process, whose CPU seconds are all there is.
"""

import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.loop.local_fleet import QuietReporter  # noqa: E402
from support.loop.local_run import drive_to_its_end  # noqa: E402

from orchestrator.config import RunConfig, parse_config  # noqa: E402
from orchestrator.exporters.prometheus import Exporter  # noqa: E402

MODEL = ROOT / "benchmarks" / "workload" / "model"
WARM_UP = 3
"""Steps of each run that are not counted."""
STEPS = 13
"""Of each run."""
TURN_S = 120.0
"""For the other's step."""
SCRAPER = """
import sys, time, urllib.request
while True:
    urllib.request.urlopen(sys.argv[1]).read()
    time.sleep(float(sys.argv[2]))
"""
SCRAPE_EVERY_S = 1.0
"""Five times as often as deploy/prometheus/prometheus.yml has it."""


def observed_pairs(pairs: int) -> dict[str, Any]:
    """CPU seconds a step of the run that is observed over those of the one that is not, less 1."""
    seconds = [take_turns(seed) for seed in range(pairs)]
    growth = [observed / bare - 1.0 for observed, bare in seconds]
    return {
        "pairs": pairs,
        "steps": STEPS - WARM_UP,
        "step_cpu_s": statistics.median(bare for _, bare in seconds),
        "growth_mean": statistics.fmean(growth),
        "growth_median": statistics.median(growth),
        "standard_error": statistics.stdev(growth) / pairs**0.5 if pairs > 1 else None,
    }


def take_turns(seed: int) -> tuple[float, float]:
    """CPU seconds a step of the observed run, and of the other."""
    context = get_context("spawn")
    batons = context.Pipe()
    answers: list[Connection] = []
    processes = []
    for observed, baton in zip((True, False), batons, strict=True):
        mine, theirs = context.Pipe(duplex=False)
        first = observed == (seed % 2 == 0)
        processes.append(context.Process(target=run_in_turns, args=(seed, observed, first, baton, theirs)))
        processes[-1].start()
        theirs.close()
        answers.append(mine)
    for baton in batons:
        baton.close()
    try:
        observed_s, bare_s = (answer.recv() for answer in answers)
    finally:
        for process in processes:
            process.join(TURN_S)
            process.kill()
    return observed_s, bare_s


def run_in_turns(seed: int, observed: bool, first: bool, baton: Connection, answer: Connection) -> None:
    """One run, which after each step waits until the other has done its own."""
    folder = Path(tempfile.mkdtemp(prefix="concord-observed-"))
    reporter, at = QuietReporter(), dict[int, float]()

    def on_step(step: int) -> None:
        at[step] = time.process_time()
        baton.send(step)
        wanted = step if first else step + 1
        while step < STEPS:
            if not baton.poll(TURN_S):
                raise RuntimeError(f"waited {TURN_S:g} s for step {wanted} of the other run")
            if baton.recv() >= wanted:
                break

    reporter.on_step = on_step
    try:
        with scraped() if observed else contextlib.nullcontext() as exporter:
            drive_to_its_end(config_of(folder, seed), reporter=reporter, exporter=exporter, deadline_s=STEPS * TURN_S)
    finally:
        shutil.rmtree(folder)
    answer.send((at[STEPS] - at[WARM_UP]) / (STEPS - WARM_UP))


@contextlib.contextmanager
def scraped() -> Generator[Exporter]:
    """An exporter that another process reads again and again."""
    with Exporter("127.0.0.1", 0) as exporter:
        scraper = subprocess.Popen([sys.executable, "-c", SCRAPER, exporter.url, str(SCRAPE_EVERY_S)])
        try:
            yield exporter
        finally:
            scraper.kill()
            scraper.wait()


def config_of(folder: Path, seed: int) -> RunConfig:
    """The quickstart's batches on the torch engine, to be repeated bit for bit."""
    document: dict[str, object] = {
        "run": {
            "dir": str(folder),
            "name": "run",
            "steps": STEPS,
            "batch_groups": 16,
            "group_size": 8,
            "seed": seed,
            "deterministic": True,
        },
        "model": {"type": "local", "path": str(MODEL)},
        "sampling": {"max_new_tokens": 8},
        "engine": {"type": "torch"},
        "staleness": {"max_staleness": 2, "order": "dispatch"},
        "trainer": {"checkpoint": {"every_steps": 1000}},
    }
    return parse_config(document, "benchmark")
