"""Conversations of several turns: each request sends exactly what the sample holds, and nothing is tokenized again."""

import asyncio
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from support.builders import BASE, build_dispatch, build_routing, build_tag
from support.episode_fakes import EOS, TOKENIZER, RecordingJudge, TalkingEnv, ToldEngine, chunk, ids

from rollout.episodes.episode import EpisodeSettings, run_group
from rollout.episodes.failure import EpisodeFailure
from rollout.episodes.sampling_keys import sampling_key
from rollout.types.dispatch import FailReason
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.supports import listed_supports
from rollout.types.trajectory import EngineTag, FinishReason, TrajectoryGroup, VersionSpan
from rollout.types.weights import PolicyVersion

LATER = PolicyVersion(1, 7)
SETTINGS = EpisodeSettings(sampling=SamplingParams(max_new_tokens=8), max_context=64)
REPLY = ids(12, 0, 9)
"""`+`, an unknown character (as a newline behind the end token would be), `7`."""


def counting(request: GenerationRequest) -> Iterable[TokenChunk]:
    """Sample i of the first turn says i + 5; later turns say 9, under a later policy."""
    first = request.request_id.count(":") == 1
    for index in range(request.num_samples):
        yield chunk(request, index, (index + 5 if first else 9, EOS), BASE if first else LATER, FinishReason.STOP)


async def start(
    engine: ToldEngine,
    envs: list[TalkingEnv],
    settings: EpisodeSettings = SETTINGS,
    judge: RecordingJudge | None = None,
    tag: EngineTag | None = None,
) -> TrajectoryGroup:
    dispatch = build_dispatch(group_size=len(envs))
    async with asyncio.timeout(20):
        return await run_group(
            dispatch,
            engine=engine,
            envs=envs,
            score=judge or RecordingJudge(),
            tag=tag or build_tag(),
            tokenizer=TOKENIZER,
            settings=settings,
        )


def run(
    engine: ToldEngine,
    envs: list[TalkingEnv],
    settings: EpisodeSettings = SETTINGS,
    judge: RecordingJudge | None = None,
    tag: EngineTag | None = None,
) -> TrajectoryGroup:
    return asyncio.run(start(engine, envs, settings, judge, tag))


def test_each_sample_goes_on_alone_with_exactly_the_ids_that_it_holds():
    engine, judge = ToldEngine(counting), RecordingJudge()
    envs = [TalkingEnv([REPLY]), TalkingEnv([REPLY, ids(4)])]
    first, second = run(engine, envs, judge=judge).trajectories
    assert first.token_ids.tolist() == [3, 14, 5, EOS, 12, 0, 9, 9, EOS]
    assert second.token_ids.tolist() == [3, 14, 6, EOS, 12, 0, 9, 9, EOS, 4, 9, EOS]
    assert first.sampled.tolist() == [False, False, True, True, False, False, False, True, True]
    assert (first.turns, second.turns) == (2, 3)
    assert second.version_spans == (VersionSpan(BASE, 2, 4), VersionSpan(LATER, 7, 9), VersionSpan(LATER, 10, 12))
    np.testing.assert_array_equal(
        second.rollout_logprobs[second.sampled], np.array([-0.06, -0.01, -0.09, -0.01, -0.09, -0.01], dtype=np.float32)
    )
    assert judge.completions == ["37", "477"]


def test_the_ids_that_an_environment_heard_are_those_in_the_sample():
    envs = [TalkingEnv([REPLY]), TalkingEnv([])]
    group = run(ToldEngine(counting), envs)
    for env, trajectory in zip(envs, group.trajectories, strict=True):
        assert env.heard == [trajectory.token_ids[span.start : span.end].tolist() for span in trajectory.version_spans]


def test_every_request_extends_the_one_before_it_token_by_token():
    engine = ToldEngine(counting)
    (trajectory,) = run(engine, [TalkingEnv([REPLY, ids(4), ids(5, 5)])]).trajectories
    assert [r.request_id for r in engine.requests] == ["d-0:0", "d-0:1:0", "d-0:2:0", "d-0:3:0"]
    sent = [r.prompt_ids.tolist() for r in engine.requests]
    for shorter, longer in zip(sent, [*sent[1:], trajectory.token_ids.tolist()], strict=True):
        assert longer[: len(shorter)] == shorter
        assert len(longer) > len(shorter)


def test_later_turns_have_sampling_keys_of_their_own():
    engine = ToldEngine(counting)
    run(engine, [TalkingEnv([]), TalkingEnv([REPLY])], replace(SETTINGS, seed=5))
    assert [r.seeds for r in engine.requests] == [
        (sampling_key(5, 0, "p-0", 0), sampling_key(5, 0, "p-0", 1)),
        (sampling_key(5, 0, "p-0", 1, turn=1),),
    ]


def test_a_sample_goes_on_while_another_is_still_in_its_first_turn():
    release = asyncio.Event()

    class OneByOne(ToldEngine):
        """The first request's second sample comes only after the first sample's second turn was asked for."""

        async def generate(self, request: GenerationRequest):
            self.requests.append(request)
            if request.request_id == "d-0:0":
                yield chunk(request, 0, (5, EOS), finish=FinishReason.STOP)
                await release.wait()
                yield chunk(request, 1, (6, EOS), finish=FinishReason.STOP)
            else:
                release.set()
                yield chunk(request, 0, (9, EOS), finish=FinishReason.STOP)

    group = run(OneByOne(counting), [TalkingEnv([REPLY]), TalkingEnv([])])
    assert [t.turns for t in group.trajectories] == [2, 1]


def test_a_sample_that_was_cut_off_hears_no_reply():
    env = TalkingEnv([REPLY])
    (trajectory,) = run(ToldEngine(lambda r: [chunk(r, 0, (5,), finish=FinishReason.LENGTH)]), [env]).trajectories
    assert env.heard == []
    assert (trajectory.turns, trajectory.finish_reason) == (1, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("context", "turns", "finish"),
    [(8, 2, FinishReason.LENGTH), (7, 1, FinishReason.LENGTH), (9, 2, FinishReason.STOP)],
)
def test_a_conversation_ends_where_the_context_holds_no_further_token(context: int, turns: int, finish: FinishReason):
    def fitting(request: GenerationRequest) -> Iterable[TokenChunk]:
        tokens = (9, EOS)[: request.sampling.max_new_tokens]
        yield chunk(request, 0, tokens, finish=FinishReason.STOP if tokens[-1] == EOS else FinishReason.LENGTH)

    (trajectory,) = run(ToldEngine(fitting), [TalkingEnv([REPLY])], replace(SETTINGS, max_context=context)).trajectories
    assert (trajectory.turns, trajectory.finish_reason) == (turns, finish)
    assert trajectory.token_ids.size == (4 if turns == 1 else context)
    assert trajectory.sampled[-1]


def test_a_raising_environment_fails_its_group_and_aborts_what_runs():
    async def broken() -> ToldEngine:
        engine = ToldEngine(counting, held=["d-0:1:0"])

        class Broken(TalkingEnv):
            async def reply(self, sampled_ids: object):
                await engine.holding.wait()
                raise KeyError("tool")

        with pytest.raises(
            EpisodeFailure, match=r"environment talking, sample 1 of dispatch d-0: KeyError: 'tool'"
        ) as caught:
            await start(engine, [TalkingEnv([REPLY]), Broken([])])
        assert caught.value.reason is FailReason.ENVIRONMENT
        return engine

    assert asyncio.run(broken()).aborted == ["d-0:1:0"]


def test_a_failing_later_turn_aborts_the_other_samples_requests():
    def second_turn_of_sample_one_dies(request: GenerationRequest) -> Iterable[TokenChunk]:
        if request.request_id == "d-0:1:1":
            raise ConnectionError("core is gone")
        yield from counting(request)

    async def failing() -> ToldEngine:
        engine = ToldEngine(second_turn_of_sample_one_dies, held=["d-0:1:0"])
        with pytest.raises(EpisodeFailure, match="request d-0:1:1 on replica 0: ConnectionError") as caught:
            await start(engine, [TalkingEnv([REPLY]), TalkingEnv([REPLY])])
        assert caught.value.reason is FailReason.ENGINE
        return engine

    assert asyncio.run(failing()).aborted == ["d-0:1:0"]


@pytest.mark.parametrize("reply", [ids(), np.array([5], dtype=np.int64), np.array([[5]], dtype=np.int32)])
def test_a_reply_that_is_no_run_of_tokens_is_an_environment_failure(reply: np.ndarray):
    with pytest.raises(EpisodeFailure, match=r"got a reply of .* expected a non-empty int32 vector") as caught:
        run(ToldEngine(counting), [TalkingEnv([reply])])
    assert caught.value.reason is FailReason.ENVIRONMENT


def test_routing_of_a_conversation_keeps_the_rows_of_the_turn_that_sampled_them():
    traces = {0: build_routing(3, seed=1), 1: build_routing(8, seed=2)}

    def routed(request: GenerationRequest) -> Iterable[TokenChunk]:
        turn = int(request.request_id.split(":")[1])
        yield chunk(request, 0, (9, EOS), finish=FinishReason.STOP, routing=traces[turn])

    routing = run(ToldEngine(routed), [TalkingEnv([REPLY])]).trajectories[0].routing
    assert routing is not None
    assert routing.covered.tolist() == [False, *[True] * 7]
    np.testing.assert_array_equal(routing.experts[1:3], traces[0].experts[1:])
    np.testing.assert_array_equal(routing.experts[3:], traces[1].experts[3:])


def test_what_each_turn_kept_of_its_draws_stands_at_its_tokens():
    def listing(request: GenerationRequest) -> Iterable[TokenChunk]:
        first = request.request_id == "d-0:0"
        kept = listed_supports([[9, 3], [EOS]] if first else [[], [4, EOS]])
        yield chunk(request, 0, (9, EOS), finish=FinishReason.STOP, supports=kept)

    trajectory = run(ToldEngine(listing), [TalkingEnv([REPLY])]).trajectories[0]
    assert trajectory.supports is not None
    assert trajectory.sampled.tolist() == [False, False, True, True, False, False, False, True, True]
    assert trajectory.supports.counts.tolist() == [0, 0, 2, 1, 0, 0, 0, 0, 2]
    assert trajectory.supports.ids.tolist() == [9, 3, EOS, 4, EOS]


def test_an_engine_that_lists_what_its_draws_kept_leaves_nothing_out():
    cut = replace(SETTINGS, sampling=replace(SETTINGS.sampling, top_k=2))
    tag, envs = replace(build_tag(), lists_supports=True), [TalkingEnv([])]
    with pytest.raises(EpisodeFailure, match="sample 0 came without the tokens that its draws kept") as caught:
        run(ToldEngine(counting), envs, cut, tag=tag)
    assert caught.value.reason is FailReason.ENGINE
    run(ToldEngine(counting), [TalkingEnv([])], cut)  # its tag promises nothing
    run(ToldEngine(counting), [TalkingEnv([])], tag=tag)  # nothing was cut


@pytest.mark.parametrize("logprob", [-9999.0, -np.inf, np.nan, 0.5, float(np.finfo(np.float32).min)])
def test_a_number_that_no_sampled_token_has_is_an_engine_fault(logprob: float):
    def answer(request: GenerationRequest) -> Iterable[TokenChunk]:
        for one in counting(request):
            yield replace(one, logprobs=np.where(one.token_ids == EOS, np.float32(logprob), one.logprobs))

    with pytest.raises(
        EpisodeFailure, match=rf"sampled token has \({logprob:g} for token {EOS}".replace("+", r"\+")
    ) as caught:
        run(ToldEngine(answer), [TalkingEnv([])])
    assert caught.value.reason is FailReason.ENGINE


def test_a_turn_that_kept_everything_lists_nothing():
    assert run(ToldEngine(counting), [TalkingEnv([REPLY])]).trajectories[0].supports is None


def test_turns_without_routing_leave_their_rows_missing():
    def routed_once(request: GenerationRequest) -> Iterable[TokenChunk]:
        routing = build_routing(3) if request.request_id == "d-0:0" else None
        yield chunk(request, 0, (9, EOS), finish=FinishReason.STOP, routing=routing)

    routing = run(ToldEngine(routed_once), [TalkingEnv([REPLY])]).trajectories[0].routing
    assert routing is not None
    assert routing.covered.tolist() == [False, True, True, *[False] * 5]
