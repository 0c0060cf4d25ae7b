"""A dispatch becomes one group: positions, versions, ids and reasons."""

import asyncio
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.builders import BASE, build_dispatch, build_routing, build_tag
from support.episode_fakes import EOS, TOKENIZER, RecordingJudge, TalkingEnv, ToldEngine, chunk, ids, stopping

from rollout.config import ArithmeticConfig
from rollout.environments.registry import build_envs
from rollout.episodes.episode import EpisodeSettings, Judge, run_group
from rollout.episodes.failure import EpisodeFailure
from rollout.episodes.sampling_keys import sampling_key
from rollout.errors import EngineError
from rollout.rewards.errors import RewardInvalid, RewardRaised, RewardTimeout, RewardWorkerDied
from rollout.types.dispatch import FailReason
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.prompts import Prompt
from rollout.types.protocols import Engine, Env
from rollout.types.trajectory import FinishReason, Reward, Trajectory, TrajectoryGroup, VersionSpan
from rollout.types.weights import PolicyVersion

LATER = PolicyVersion(1, 7)
SETTINGS = EpisodeSettings(sampling=SamplingParams(max_new_tokens=8), max_context=64)
DISPATCH = build_dispatch()
"""Two samples of `12+34=`."""
PROMPT = [3, 4, 12, 5, 6, 14]


def run(
    engine: Engine | Callable[[GenerationRequest], Iterable[TokenChunk]],
    envs: Sequence[Env] | None = None,
    score: Judge | None = None,
    settings: EpisodeSettings = SETTINGS,
    group_size: int = 2,
) -> TrajectoryGroup:
    """The group of DISPATCH, within a deadline."""

    async def episode() -> TrajectoryGroup:
        async with asyncio.timeout(20):
            return await start(ToldEngine(engine) if callable(engine) else engine, envs, score, settings, group_size)

    return asyncio.run(episode())


async def start(
    engine: Engine,
    envs: Sequence[Env] | None = None,
    score: Judge | None = None,
    settings: EpisodeSettings = SETTINGS,
    group_size: int = 2,
) -> TrajectoryGroup:
    dispatch = replace(DISPATCH, group_size=group_size)
    envs = envs or build_envs(ArithmeticConfig(), dispatch.prompt, TOKENIZER, group_size)
    return await run_group(
        dispatch,
        engine=engine,
        envs=envs,
        score=score or RecordingJudge(),
        tag=build_tag(),
        tokenizer=TOKENIZER,
        settings=settings,
    )


def failure(
    engine: Engine | Callable[[GenerationRequest], Iterable[TokenChunk]],
    score: Judge | None = None,
    settings: EpisodeSettings = SETTINGS,
    group_size: int = 2,
) -> EpisodeFailure:
    """How `run` failed."""
    with pytest.raises(EpisodeFailure) as caught:
        run(engine, score=score, settings=settings, group_size=group_size)
    return caught.value


def test_a_dispatch_becomes_a_group_of_trajectories_with_their_rewards():
    engine, judge = ToldEngine(stopping(8, 6)), RecordingJudge()
    group = run(engine, score=judge)
    (request,) = engine.requests
    assert (request.request_id, request.num_samples, request.prompt_ids.tolist(), request.eos_ids, request.seeds) == (
        "d-0:0",
        2,
        PROMPT,
        (EOS,),
        (),
    )
    assert request.sampling == SETTINGS.sampling
    assert (group.dispatch_id, group.prompt_id, group.pass_index, group.environment) == ("d-0", "p-0", 0, "arithmetic")
    assert [t.trajectory_id for t in group.trajectories] == ["d-0-0", "d-0-1"]
    assert [r.total for r in group.rewards] == [0.0, 1.0]
    assert judge.completions == ["64", "64"]
    for trajectory in group.trajectories:
        assert trajectory.token_ids.tolist() == [*PROMPT, 8, 6, EOS]
        assert trajectory.sampled.tolist() == [False] * 6 + [True] * 3
        np.testing.assert_array_equal(
            trajectory.rollout_logprobs, np.array([0] * 6 + [-0.08, -0.06, -0.01], dtype=np.float32)
        )
        assert trajectory.version_spans == (VersionSpan(BASE, 6, 9),)
        assert (trajectory.turns, trajectory.finish_reason, trajectory.tag) == (1, FinishReason.STOP, build_tag())
        assert 0 <= trajectory.timings.generation_s < 20
    assert 0 < group.reward_s < 20


def test_what_the_judge_sees_is_what_the_group_holds():
    seen: list[Trajectory] = []

    async def score(prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        seen.extend(trajectories)
        return [Reward(total=1.0)] * len(trajectories)

    group = run(stopping(8), score=score)
    assert all(before is after for before, after in zip(seen, group.trajectories, strict=True))


def test_a_tokens_version_is_its_chunks_across_an_update_in_mid_request():
    def across(request: GenerationRequest) -> Iterable[TokenChunk]:
        yield chunk(request, 1, (8, 9, 10))
        yield chunk(request, 0, (8,))
        yield chunk(request, 1, (5, EOS), LATER, FinishReason.STOP)
        yield chunk(request, 0, (), LATER)
        yield chunk(request, 0, (6,))
        yield chunk(request, 0, (7, 7), LATER, FinishReason.LENGTH)

    first, second = run(across).trajectories
    assert first.version_spans == (VersionSpan(BASE, 6, 8), VersionSpan(LATER, 8, 10))
    assert second.version_spans == (VersionSpan(BASE, 6, 9), VersionSpan(LATER, 9, 11))
    assert first.token_versions().tolist() == [-1] * 6 + [0, 0, 7, 7]
    assert second.token_versions().tolist() == [-1] * 6 + [0, 0, 0, 7, 7]
    assert second.token_ids[second.token_versions() == 7].tolist() == [5, EOS]
    assert DISPATCH.policy == BASE


def test_versions_follow_the_chunks_even_where_dispatch_and_completion_say_otherwise():
    old = PolicyVersion(1, 3)
    assert run(stopping(8, policy=old)).trajectories[0].version_spans == (VersionSpan(old, 6, 8),)


def test_vector_v14_spans_become_the_versions_of_the_sampled_tokens(golden: dict[str, Any]):
    vector = golden["V14_spans"]

    def by_spans(request: GenerationRequest) -> Iterable[TokenChunk]:
        for span in vector["spans"]:
            last = span["end"] == len(vector["token_versions"])
            yield chunk(
                request,
                0,
                [5] * (span["end"] - span["start"]),
                PolicyVersion(1, span["version"]),
                FinishReason.LENGTH if last else None,
            )

    (trajectory,) = run(by_spans, group_size=1).trajectories
    assert trajectory.token_versions()[trajectory.sampled].tolist() == vector["token_versions"]
    assert [(s.policy.version, s.start - 6, s.end - 6) for s in trajectory.version_spans] == [
        (s["version"], s["start"], s["end"]) for s in vector["spans"]
    ]


def test_an_unknown_version_is_an_engine_failure_never_a_default():
    failed = failure(
        lambda request: [chunk(request, 0, (8, EOS), PolicyVersion(1, -1), FinishReason.STOP)], group_size=1
    )
    assert failed.reason is FailReason.ENGINE
    assert "an unknown version is an error, never a default" in failed.detail


def test_special_tokens_stay_in_the_ids_and_only_leave_the_text():
    judge = RecordingJudge()
    group = run(
        lambda request: [chunk(request, 0, (8, 0, EOS, 6, 1), finish=FinishReason.LENGTH)], score=judge, group_size=1
    )
    assert group.trajectories[0].token_ids.tolist() == [*PROMPT, 8, 0, EOS, 6, 1]
    assert judge.completions == ["64"]


def test_text_is_decoded_only_for_a_reward_that_looks_at_it():
    judge = RecordingJudge()
    run(stopping(8, 6), score=judge, settings=replace(SETTINGS, decode=False))
    assert judge.completions == ["", ""]


def test_sampling_keys_go_along_in_deterministic_mode():
    engine = ToldEngine(stopping(8))
    run(engine, settings=replace(SETTINGS, seed=5))
    assert engine.requests[0].seeds == (sampling_key(5, 0, "p-0", 0), sampling_key(5, 0, "p-0", 1))


def test_routing_is_carried_as_the_engine_gave_it():
    routing = build_routing(7)
    (trajectory,) = run(
        lambda request: [chunk(request, 0, (8, EOS), finish=FinishReason.STOP, routing=routing)], group_size=1
    ).trajectories
    assert trajectory.routing is routing


def test_routing_of_another_length_is_an_engine_failure():
    failed = failure(
        lambda request: [chunk(request, 0, (8, EOS), finish=FinishReason.STOP, routing=build_routing(6))], group_size=1
    )
    assert failed.reason is FailReason.ENGINE
    assert "routing has 6 rows for 8 tokens" in failed.detail


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda r: [chunk(r, 0, (8,))], r"without a finish reason for samples \[0\] of 1"),
        (lambda r: [], r"without a finish reason for samples \[0\] of 1"),
        (lambda r: [chunk(r, 0, (), finish=FinishReason.STOP)], "sample 0 ended with 0 tokens; expected 1 to 8"),
        (lambda r: [chunk(r, 0, [5] * 9, finish=FinishReason.LENGTH)], "sample 0 ended with 9 tokens; expected 1 to 8"),
        (
            lambda r: [chunk(r, 1, (8, EOS), finish=FinishReason.STOP)],
            "got sample 1 of request d-0:0; expected samples 0 to 0",
        ),
        (
            lambda r: [replace(chunk(r, 0, (8, EOS), finish=FinishReason.STOP), request_id="d-9:0")],
            "of request d-9:0; expected",
        ),
        (
            lambda r: [chunk(r, 0, (EOS,), finish=FinishReason.STOP), chunk(r, 0, (8,))],
            "went on after its finish reason",
        ),
        (
            lambda r: [chunk(r, 0, (8,), finish=FinishReason.STOP)],
            r"stopped, but its last token 8 is none of the end tokens \(1,\)",
        ),
        (lambda r: [chunk(r, 0, (8,), finish=FinishReason.ABORT)], "sample 0 was aborted after 1 tokens"),
        (
            lambda r: [
                replace(chunk(r, 0, (8, EOS), finish=FinishReason.STOP), logprobs=np.zeros(2, dtype=np.float16))
            ],
            "float16 log-probs; expected int32 and float32",
        ),
        (
            lambda r: [
                replace(
                    chunk(r, 0, (8, EOS), finish=FinishReason.STOP), logprobs=np.array([np.nan, 0], dtype=np.float32)
                )
            ],
            r"no sampled token has \(nan",
        ),
    ],
)
def test_an_answer_that_breaks_the_requests_terms_is_an_engine_failure(
    answer: Callable[[GenerationRequest], list[TokenChunk]], message: str
):
    with pytest.raises(EpisodeFailure, match=message) as caught:
        run(answer, group_size=1)
    assert caught.value.reason is FailReason.ENGINE


def test_whatever_an_engine_raises_is_an_engine_failure_that_names_request_and_replica():
    def dying(request: GenerationRequest) -> Iterable[TokenChunk]:
        raise ConnectionError("core is gone")

    failed = failure(dying)
    assert (failed.reason, failed.detail) == (
        FailReason.ENGINE,
        "request d-0:0 on replica 0: ConnectionError: core is gone",
    )


def test_a_prompt_that_leaves_no_room_fails_before_any_engine_sees_it():
    engine = ToldEngine(stopping(8))
    failed = failure(engine, settings=replace(SETTINGS, max_context=6))
    assert failed.reason is FailReason.PROMPT_TOO_LONG
    assert "prompt p-0 has 6 tokens, but the context of 6 must hold one more; shorten the prompt" in failed.detail
    assert engine.requests == []


def test_a_context_with_little_room_asks_for_what_fits_and_the_sample_says_length():
    engine = ToldEngine(lambda r: [chunk(r, 0, [5] * r.sampling.max_new_tokens, finish=FinishReason.LENGTH)])
    (trajectory,) = run(engine, settings=replace(SETTINGS, max_context=7), group_size=1).trajectories
    assert engine.requests[0].sampling == replace(SETTINGS.sampling, max_new_tokens=1)
    assert (trajectory.token_ids.size, trajectory.finish_reason) == (7, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RewardRaised("why"), FailReason.REWARD_RAISED),
        (RewardInvalid("why"), FailReason.REWARD_INVALID),
        (RewardTimeout("why"), FailReason.REWARD_TIMEOUT),
        (RewardWorkerDied("why"), FailReason.REWARD_WORKER_DIED),
        (OSError("why"), FailReason.REWARD_RAISED),
    ],
)
def test_a_failing_reward_ends_the_episode_with_its_reason(error: Exception, reason: FailReason):
    async def score(prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        raise error

    failed = failure(stopping(8), score=score)
    assert failed.reason is reason
    assert "dispatch d-0" in failed.detail
    assert "why" in failed.detail


def test_too_few_rewards_are_invalid():
    async def score(prompt: Prompt, trajectories: Sequence[Trajectory], completions: Sequence[str]) -> Sequence[Reward]:
        return [Reward(total=1.0)]

    failed = failure(stopping(8), score=score)
    assert failed.reason is FailReason.REWARD_INVALID
    assert "got 1 rewards for 2 trajectories" in failed.detail


@pytest.mark.parametrize(
    ("envs", "message"),
    [
        ([TalkingEnv([])], "got 1 environments for a group of 2"),
        ([TalkingEnv([]), TalkingEnv([], prompt=ids(4, 14))], "show different prompts"),
        ([TalkingEnv([], prompt=ids())] * 2, r"a prompt of int32 \(0,\); expected a non-empty int32 vector"),
    ],
)
def test_environments_that_make_no_group_are_an_environment_failure(envs: list[Env], message: str):
    with pytest.raises(EpisodeFailure, match=message) as caught:
        run(stopping(8), envs=envs)
    assert caught.value.reason is FailReason.ENVIRONMENT


def test_a_second_episode_of_a_dispatch_fails_and_leaves_the_first_its_request():
    async def twice() -> TrajectoryGroup:
        async with asyncio.timeout(20):
            engine = ToldEngine(stopping(8, 6), held=["d-0:0"])
            first = asyncio.create_task(start(engine))
            await engine.holding.wait()
            with pytest.raises(EpisodeFailure, match="already running"):
                await start(engine)
            assert engine.aborted == []
            engine.release.set()
            group = await first
            assert len(engine.requests) == 1
            return group

    assert [t.token_ids.tolist() for t in asyncio.run(twice()).trajectories] == [[*PROMPT, 8, 6, EOS]] * 2


def test_a_cancelled_episode_aborts_its_request_and_no_other():
    async def cancelled() -> ToldEngine:
        async with asyncio.timeout(20):
            engine = ToldEngine(stopping(8), held=["d-0:0"])
            task = asyncio.create_task(start(engine))
            await engine.holding.wait()
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            return engine

    assert asyncio.run(cancelled()).aborted == ["d-0:0"]


def test_an_answer_that_is_refused_is_aborted_and_a_failing_abort_hides_nothing():
    class Unstoppable(ToldEngine):
        async def abort(self, request_id: str) -> None:
            await super().abort(request_id)
            raise EngineError("cannot abort")

    engine = Unstoppable(lambda r: [chunk(r, 0, (8,), finish=FinishReason.STOP)])
    assert "none of the end tokens" in failure(engine).detail
    assert engine.aborted == ["d-0:0"]


def test_a_failure_keeps_reason_and_detail_between_processes():
    copy = pickle.loads(pickle.dumps(EpisodeFailure(FailReason.ENGINE, "why")))
    assert (copy.reason, copy.detail, str(copy)) == (FailReason.ENGINE, "why", "engine: why")


def test_a_sampling_key_is_the_same_everywhere_and_for_ever():
    assert sampling_key(7, 0, "12+34", 3) == 7569982877270253284
    assert sampling_key(0, 2, "é", 0, turn=1) == 2571856118991520188


def test_sampling_keys_have_63_bits_and_differ_in_every_argument():
    keys = [
        sampling_key(s, p, i, n, t) for s in (0, 1) for p in (0, 1) for i in ("1", "11") for n in (0, 1) for t in (0, 1)
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
