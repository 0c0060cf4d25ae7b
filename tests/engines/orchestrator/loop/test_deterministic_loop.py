"""Invariant 5: eta = 0 gives the result of a synchronous loop, bit for bit; the comparator is written out here."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.builders import build_stored
from support.loop.local_fleet import LocalFleet, QuietReporter, inputs_of
from support.paths import MODEL

from orchestrator.config import RunConfig, parse_config
from orchestrator.launch.launch import drive
from orchestrator.run_dir.layout import create_run_dir
from rollout.engines.registry import build_engine
from rollout.environments.registry import build_envs, build_source
from rollout.episodes.episode import EpisodeSettings, run_group
from rollout.rewards.judging import judge_group
from rollout.rewards.registry import build_reward
from rollout.store.sqlite.reader import open_reader
from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.dispatch import Dispatch
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import PauseMode, SamplingParams
from rollout.types.prompts import Prompt, PromptCursor
from rollout.types.trajectory import Reward, Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.step.build import TrainerRank, build_trainer
from trainer.types.step import StepRequest

STEPS = 4


def config_of(tmp_path: Path, name: str, eta: int) -> RunConfig:
    document: dict[str, object] = {
        "run": {
            "dir": str(tmp_path),
            "name": name,
            "steps": STEPS,
            "batch_groups": 2,
            "group_size": 4,
            "seed": 7,
            "deterministic": True,
        },
        "model": {"type": "local", "path": str(MODEL)},
        "engine": {"type": "torch"},
        "staleness": {"max_staleness": eta, "order": "dispatch"},
    }
    return parse_config(document, "test")


def trainer_of(config: RunConfig, tmp_path: Path, name: str) -> TrainerRank:
    rendezvous = f"file://{tmp_path / f'{name}-rendezvous'}"
    return build_trainer(
        model_dir=MODEL,
        config=config.trainer,
        weights=config.weights,
        total_steps=STEPS,
        seed=config.run.seed,
        rank=0,
        init_method=rendezvous,
    )


def run_of(config: RunConfig, tmp_path: Path, name: str) -> tuple[str, list[list[int]]]:
    """Digest of the last weights, and the tokens of every trajectory, from the asynchronous loop."""
    run, trainer = create_run_dir(config, name), trainer_of(config, tmp_path, name)

    async def main() -> None:
        fleet = LocalFleet(config, run.path, MODEL, trainer)
        try:
            async with asyncio.timeout(60.0):
                await drive(config, run, inputs_of(config, MODEL), fleet, QuietReporter())
        finally:
            await fleet.close()

    try:
        asyncio.run(main())
        manifest = trainer.publish(PolicyVersion(9, STEPS), tmp_path / f"{name}-final")
    finally:
        trainer.close()
    assert manifest is not None
    reader = open_reader(run.path)
    groups = [reader.read_group(i) for commit in reader.commits() for i in commit.dispatch_ids]
    reader.close()
    return manifest.digest, [t.token_ids.tolist() for group in groups if group for t in group.trajectories]


def synchronous(config: RunConfig, tmp_path: Path) -> tuple[str, list[list[int]]]:
    """The same by the plainest loop there is: sample, judge, train, update."""
    trainer, tokenizer, function = (
        trainer_of(config, tmp_path, "plain"),
        load_tokenizer(MODEL),
        build_reward(config.reward),
    )
    source, size = build_source(config.environment, config.run.seed), config.run.group_size
    settings = EpisodeSettings(
        sampling=SamplingParams(**config.sampling.model_dump()), max_context=512, seed=config.run.seed
    )
    tokens: list[list[int]] = []

    async def score(prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        return judge_group(function, prompt, completions, trajectories)

    async def main() -> str:
        manifest = trainer.publish(PolicyVersion(1, 0), tmp_path / "plain-0")
        assert manifest is not None
        engine = build_engine(
            config.engine, EngineIdentity(replica=0, seed=config.run.seed, deterministic=True, sampling=config.sampling)
        )
        tag, cursor = await engine.start(manifest), PromptCursor()
        for step in range(1, STEPS + 1):
            prompts, cursor = source.draw(cursor, config.run.batch_groups)
            groups: list[TrajectoryGroup] = []
            for number, prompt in enumerate(prompts):
                dispatch = Dispatch(
                    dispatch_id=f"s{step}-{number}",
                    prompt=prompt,
                    group_size=size,
                    attempt=1,
                    policy=manifest.policy,
                    replica=0,
                    created_at_s=0.0,
                )
                envs = build_envs(config.environment, prompt, tokenizer, size)
                group = await run_group(
                    dispatch, engine=engine, envs=envs, score=score, tag=tag, tokenizer=tokenizer, settings=settings
                )
                tokens.extend(t.token_ids.tolist() for t in group.trajectories)
                groups.append(group)
            trainer.step(build_stored(groups), StepRequest(policy=PolicyVersion(1, step), oldest_version=0))
            manifest = trainer.publish(PolicyVersion(1, step), tmp_path / f"plain-{step}")
            assert manifest is not None
            await engine.pause(PauseMode.DRAIN)
            await engine.apply(manifest)
            await engine.resume()
        await engine.stop()
        return manifest.digest

    try:
        return asyncio.run(main()), tokens
    finally:
        trainer.close()


@pytest.mark.timeout(180)
def test_eta_0_equals_a_synchronous_loop_bit_for_bit(tmp_path: Path) -> None:
    config = config_of(tmp_path, "loop", eta=0)
    assert run_of(config, tmp_path, "loop") == synchronous(config, tmp_path)


@pytest.mark.timeout(180)
def test_a_deterministic_run_with_staleness_repeats_itself_bit_for_bit(tmp_path: Path) -> None:
    first = run_of(config_of(tmp_path, "first", eta=1), tmp_path, "first")
    assert first == run_of(config_of(tmp_path, "second", eta=1), tmp_path, "second")
    assert first[0] != run_of(config_of(tmp_path, "fresh", eta=0), tmp_path, "fresh")[0]
