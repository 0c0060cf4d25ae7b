"""SIGKILL: what a run can replace is replaced and it goes on; what it cannot replace ends it with a name, and a resume
finishes it."""

import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.loop.concord_process import ENDLESS, START_S, STEP_S, ConcordProcess, write_config
from support.loop.run_record import assert_counts_add_up, assert_record, kinds_of, summary_of

Start = Callable[..., ConcordProcess]
EVERY = 4
"""Steps from checkpoint to checkpoint in the config of these tests."""


def has_checkpoint(run: Path) -> bool:
    return any(run.glob("checkpoints/e*-v*/state.json"))


@pytest.mark.timeout(9 * (START_S + STEP_S))
def test_no_dispatch_is_lost_or_trained_twice_whatever_is_killed_for_good(concord: Start, tmp_path: Path):
    """Invariants 1 and 3: the driver before the first checkpoint, the store, the driver again later, a trainer rank;
    each time the run is resumed."""
    config, run, draws = write_config(tmp_path), tmp_path / "runs" / "run", random.Random(1)
    first = concord("run", config, "--set", ENDLESS, "--set", "trainer.checkpoint.every_steps=100000")
    first.until_step(draws.randrange(1, EVERY - 1))
    first.kill()
    assert first.left_of_actors() == []

    assert not has_checkpoint(run)

    second = concord("resume", run, "--set", f"trainer.checkpoint.every_steps={EVERY}")
    second.until_step(EVERY + draws.randrange(1, EVERY))
    assert second.steps[0] == 1
    second.kill_actor("StoreActor")
    assert second.exit_status(STEP_S) == 1
    assert "the store is gone" in second.errors
    assert second.left_of_it() == []

    third = concord("resume", run)
    third.until_step(EVERY + 1)
    third.until_step(third.steps[0] + draws.randrange(EVERY))
    third.kill()
    assert third.left_of_actors() == []

    fourth = concord("resume", run)
    fourth.until_step(EVERY + 1)
    fourth.kill_actor("TrainerActor")
    assert fourth.exit_status(STEP_S) == 1
    assert "trainer rank 0 is gone" in fourth.errors
    assert fourth.left_of_it() == []

    steps = fourth.steps[-1] + 5
    last = concord("resume", run, "--set", f"run.steps={steps}")
    assert last.exit_status() == 0, last.errors
    summary = summary_of(run)
    assert (summary["version"], summary["steps"], summary["trainer_epoch"]) == (steps, steps, 5)
    assert_counts_add_up(summary)
    assert_record(run, steps=steps, batch_groups=3, max_staleness=2)


def replace(process: ConcordProcess, run: Path, kind: str, **events: int) -> None:
    """SIGKILL one actor of that class, and wait until there is another one, the events say so, and the run has gone
    on."""
    before = process.actors(kind)
    before[0].kill()
    process.until(
        lambda: len(set(process.actors(kind)) - {before[0]}) == len(before) and kinds_of(run) >= Counter(events),
        f"another {kind}",
    )
    process.until_step(process.steps[-1] + 4)


@pytest.mark.timeout(6 * (START_S + STEP_S))
def test_a_killed_engine_episode_worker_or_reward_worker_is_replaced_and_the_run_goes_on(
    concord: Start, tmp_path: Path
):
    """Also: a dead engine is found by the first group that it fails; groups do not run into it until the next health
    check, an hour away."""
    config, run = write_config(tmp_path), tmp_path / "runs" / "run"
    process = concord("run", config, "--set", ENDLESS, "--set", "deadlines.health_interval_s=3600")
    process.until_step(2)
    replace(process, run, "RewardActor")
    replace(process, run, "EpisodeActor", worker_lost=1)
    replace(process, run, "EngineActor", replica_failed=1, replica_restarted=1)
    process.signal(signal.SIGTERM)
    assert process.exit_status(STEP_S) == 0, process.errors
    assert process.left_of_it() == []
    summary, window = summary_of(run), 9
    assert (summary["replica_restarts"], summary["worker_restarts"]) == (1, 1)
    assert 1 <= summary["failed"]["engine"] <= 2 * window
    assert 1 <= summary["failed"]["worker"] <= window
    assert 1 <= summary["failed"]["reward_worker_died"] <= window
    assert_counts_add_up(summary)
    assert_record(run, steps=summary["version"], batch_groups=3, max_staleness=2)
