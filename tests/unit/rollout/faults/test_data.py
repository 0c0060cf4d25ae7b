"""Planted faults of rewards, prompts, evaluations and speed: each does what it says from its start on, and nothing
else."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.builders import BASE, build_tag, build_trajectory
from support.episode_fakes import EOS, TOKENIZER, ToldEngine, ids, stopping

from orchestrator.config import parse_config
from rollout.config import ArithmeticConfig, EvaluationConfig, ExactMatchConfig, SamplingConfig
from rollout.environments.registry import build_source
from rollout.errors import UserError
from rollout.evaluation.evaluator import EvaluationReport, build_evaluator
from rollout.evaluation.overlap import check_prompts
from rollout.evaluation.prompts import held_out_prompts
from rollout.faults.config import FaultConfig, FaultsConfig, SlowReplicaFault
from rollout.faults.data_config import (
    DeadRewardWorkerFault,
    EasyPromptsFault,
    EvaluationTemplateFault,
    LengthRewardFault,
    RewardFlipFault,
    TrainEvalOverlapFault,
)
from rollout.faults.engines.answers import SlowReplica
from rollout.faults.evaluations import plant_evaluator
from rollout.faults.rewards import PART, plant_reward
from rollout.faults.sources import plant_source
from rollout.rewards.registry import needs_text
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.prompts import Prompt, PromptCursor
from rollout.types.trajectory import Reward, Trajectory, VersionSpan
from rollout.types.weights import PolicyVersion

PROMPT = Prompt(prompt_id="p", pass_index=0, text="1+1=", answer="2")
SUMS = ArithmeticConfig(digits=1, prompts=40)
HELD_OUT = EvaluationConfig(every_steps=5, prompts=10)


def right(prompt: Prompt, completion: str, trajectory: Trajectory) -> Reward:
    return Reward(total=1.0, parts=(("inner", 1.0),))


def sampled_under(version: int, number: int = 0) -> Trajectory:
    made = build_trajectory(f"d-{number}")
    span = made.version_spans[0]
    last = VersionSpan(policy=PolicyVersion(1, version), start=span.start, end=made.version_spans[-1].end)
    return replace(made, version_spans=(last,))


def rewarded(fault: FaultConfig, trajectory: Trajectory) -> Reward:
    return plant_reward(right, FaultsConfig(plant=(fault,)))(PROMPT, "2", trajectory)


# --- rewards
# -----------------------------------------------------------------------------------------------------------


def test_length_is_paid_for_each_sampled_token_and_says_so_in_a_part():
    trajectory = sampled_under(1)
    reward = rewarded(LengthRewardFault(per_token=0.5), trajectory)
    extra = 0.5 * trajectory.num_sampled
    assert (reward.total, reward.parts) == (1.0 + extra, (("inner", 1.0), (PART, extra)))


def test_a_flipped_reward_is_one_minus_itself():
    assert rewarded(RewardFlipFault(), sampled_under(1)).total == 0.0


LATE = (
    LengthRewardFault(start_version=3),
    RewardFlipFault(start_version=3),
    DeadRewardWorkerFault(start_version=3, rate=1),
)


@pytest.mark.parametrize("fault", LATE, ids=lambda fault: fault.type)
def test_before_its_start_version_a_reward_is_as_it_should_be(fault: FaultConfig):
    assert rewarded(fault, sampled_under(2)) == Reward(total=1.0, parts=(("inner", 1.0),))


def test_a_share_of_trajectories_is_hit_the_same_every_time():
    fault = RewardFlipFault(rate=0.5)
    hit = [rewarded(fault, sampled_under(1, number)).total == 0.0 for number in range(200)]
    assert hit == [rewarded(fault, sampled_under(1, number)).total == 0.0 for number in range(200)]
    assert 70 < sum(hit) < 130


def test_a_reward_worker_dies_at_some_dispatches_whole_groups_at_a_time():
    died: list[str] = []
    dying = plant_reward(right, FaultsConfig(plant=(DeadRewardWorkerFault(rate=0.3),)), die=lambda: died.append("dead"))
    of_dispatch = []
    for number in range(60):
        before = len(died)
        for index in range(2):
            dying(PROMPT, "2", replace(sampled_under(1, number), trajectory_id=f"d-{number}-{index}"))
        of_dispatch.append(len(died) - before)
    assert set(of_dispatch) == {0, 2}
    assert 8 < of_dispatch.count(2) < 30


def test_without_a_fault_of_rewards_the_function_stays_as_it_is():
    assert plant_reward(right, FaultsConfig(plant=(EasyPromptsFault(),))) is right


def test_a_planted_reward_hands_on_whether_it_needs_text():
    def blind(prompt: Prompt, completion: str, trajectory: Trajectory) -> Any:
        return 1.0

    blind.needs_text = False  # pyright: ignore[reportFunctionMemberAccess]
    planted = plant_reward(blind, FaultsConfig(plant=(RewardFlipFault(),)))
    assert not needs_text(planted)
    assert planted(PROMPT, "", sampled_under(1)).total == 0.0


# --- prompts
# -----------------------------------------------------------------------------------------------------------


def a_pass(fault: FaultConfig, digits: int | None = 1) -> list[Prompt]:
    held_out = held_out_prompts(SUMS, HELD_OUT, 0)
    source = plant_source(build_source(SUMS, 0), FaultsConfig(plant=(fault,)), held_out, digits=digits, seed=0)
    return source.draw(PromptCursor(), source.size)[0]


def test_held_out_prompts_come_into_training_and_the_check_says_so():
    prompts, held_out = a_pass(TrainEvalOverlapFault(rate=0.5)), held_out_prompts(SUMS, HELD_OUT, 0)
    honest = build_source(SUMS, 0).draw(PromptCursor(), 40)[0]
    taken = [(planted, good) for planted, good in zip(prompts, honest, strict=True) if planted != good]
    assert 8 < len(taken) < 32
    assert {planted.text for planted, _ in taken} <= {prompt.text for prompt in held_out}
    assert check_prompts(prompts, held_out).exact == len({planted.text for planted, _ in taken})
    assert prompts == a_pass(TrainEvalOverlapFault(rate=0.5))


def test_easy_prompts_are_the_sums_below_ten_that_are_not_held_out():
    prompts, held_out = a_pass(EasyPromptsFault()), held_out_prompts(SUMS, HELD_OUT, 0)
    below_ten = [prompt for prompt in held_out if len(str(prompt.answer)) == 1]
    assert below_ten, "else this shows nothing"
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 55 - len(below_ten)
    assert all(len(str(prompt.answer)) == 1 for prompt in prompts)
    assert check_prompts(prompts, held_out).overlapping == 0


def test_easy_prompts_of_anything_but_sums_are_refused():
    with pytest.raises(UserError, match="easy_prompts makes sums"):
        a_pass(EasyPromptsFault(), digits=None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (['faults.plant=[{type="eval_template_changed"}]'], "nothing is evaluated; set evaluation.every_steps"),
        (['faults.plant=[{type="train_eval_overlap"}]'], "nothing is evaluated; set evaluation.every_steps"),
        (['faults.plant=[{type="easy_prompts"}]', 'environment={type="jsonl", path="x.jsonl"}'], "it makes sums"),
        (['faults.plant=[{type="slow_replica", replica=3}]'], "got replica = 3"),
        (['faults.plant=[{type="reward_flip", replica=0}]'], "replica"),
    ],
)
def test_a_fault_that_cannot_act_is_refused_with_the_cure(settings: Sequence[str], said: str):
    with pytest.raises(UserError) as caught:
        parse_config({}, "test", settings)
    assert said in str(caught.value)


# --- evaluations
# -------------------------------------------------------------------------------------------------------


def evaluations(*faults: FaultConfig) -> list[EvaluationReport]:
    """Of versions 0, 1 and 2."""

    def build(tokenizer: Tokenizer):
        return build_evaluator(
            config=HELD_OUT,
            environment=SUMS,
            reward=ExactMatchConfig(),
            sampling=SamplingConfig(),
            seed=0,
            max_context=64,
            tokenizer=tokenizer,
        )

    evaluator = plant_evaluator(build, TOKENIZER, FaultsConfig(plant=faults))
    evaluator.connect(0, ToldEngine(stopping(5)), build_tag())
    return [asyncio.run(evaluator.evaluate(0, PolicyVersion(1, version), str(version))) for version in range(3)]


def test_a_changed_template_shows_in_the_fingerprint_from_its_start_version_on():
    honest, planted = evaluations(), evaluations(EvaluationTemplateFault(start_version=2))
    assert len({report.fingerprint for report in honest}) == 1
    assert [report.fingerprint == honest[0].fingerprint for report in planted] == [True, True, False]
    differing = {name for (name, a), (_, b) in zip(honest[2].parts, planted[2].parts, strict=True) if a != b}
    assert differing == {"chat_template", "prompt_ids"}


# --- speed
# -------------------------------------------------------------------------------------------------------------


def test_a_slow_replica_waits_before_each_request_from_its_start_version_on():
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def chunks(answer: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
        return [chunk async for chunk in answer]

    engine = SlowReplica(ToldEngine(stopping(5)), SlowReplicaFault(delay_s=0.25, start_version=1), 0, sleep)
    request = GenerationRequest(
        request_id="r", prompt_ids=ids(3, 14), num_samples=2, sampling=SamplingParams(max_new_tokens=4), eos_ids=(EOS,)
    )

    async def run() -> None:
        engine.policy = BASE
        before = await chunks(engine.generate(request))
        assert waits == []
        engine.policy = PolicyVersion(1, 1)
        after = await chunks(engine.generate(request))
        assert [chunk.token_ids.tolist() for chunk in before] == [chunk.token_ids.tolist() for chunk in after]

    asyncio.run(run())
    assert waits == [0.25]
