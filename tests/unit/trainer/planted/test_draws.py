"""Which steps and which token terms a planted gradient fault hits."""

import numpy as np
import pytest
from support.trainer.trainer_room import stored

from rollout.faults.gradient_config import GradSpikeFault, NanTokenFault, RatioSpikeFault, TermFault, TwoSpikesFault
from trainer.algorithms.grpo import Grpo
from trainer.batching.batcher import build_batch
from trainer.batching.packing import pack
from trainer.config.trainer import GrpoConfig
from trainer.planted.draws import LEAST_SHARE, DrawnTerm, StepPulls, candidates, draw_terms, generator
from trainer.types.evidence import audited_groups
from trainer.types.step import StepBatches


def step_of(ranks: int = 1, micro_batch_tokens: int = 42, lengths: tuple[int, ...] = (3, 11, 6)) -> StepBatches:
    groups = stored(lengths=lengths)
    audited = audited_groups(groups)
    return pack(build_batch(audited, Grpo(GrpoConfig()), 0, "token_mean").samples, ranks, micro_batch_tokens)


def pulls_of(step: StepBatches) -> StepPulls:
    """Of a token, whatever row it stands in: the surprise of its rollout log-prob; none where there is no advantage."""
    return [
        [np.where(micro.loss_mask & (micro.advantages != 0), -micro.rollout_logprobs, 0.0) for micro in of_rank]
        for of_rank in step
    ]


def drawn(fault: TermFault, step: StepBatches, version: int = 5, seed: int = 0) -> tuple[DrawnTerm, ...]:
    return draw_terms(fault, step, candidates(fault, step, pulls_of(step)), generator(seed, fault.type, 0, version))


@pytest.mark.parametrize(
    ("start", "every", "hit"), [(3, 0, [3]), (3, 2, [3, 5, 7, 9]), (1, 4, [1, 5, 9]), (1, 1, list(range(1, 11)))]
)
def test_a_fault_hits_its_first_version_and_then_every_so_many(start: int, every: int, hit: list[int]):
    fault = NanTokenFault(start_version=start, every_steps=every)
    assert [version for version in range(1, 11) if fault.hits(version)] == hit


def test_a_draw_depends_on_seed_version_and_fault_and_on_nothing_else():
    step = step_of()
    assert drawn(NanTokenFault(), step) == drawn(NanTokenFault(), step)
    versions = {drawn(NanTokenFault(), step, version) for version in range(1, 30)}
    seeds = {drawn(NanTokenFault(), step, seed=seed) for seed in range(30)}
    assert len(versions) > 10 and len(seeds) > 10


@pytest.mark.parametrize("fault", [GradSpikeFault(), RatioSpikeFault(), NanTokenFault()])
def test_what_is_drawn_is_a_loss_token_on_which_the_fault_shows(fault: TermFault):
    step = step_of(ranks=2)
    pulls = pulls_of(step)
    mean = sum(pull.sum() for of_rank in pulls for pull in of_rank) / sum(
        micro.loss_mask.sum() for of_rank in step for micro in of_rank
    )
    for version in range(1, 60):
        (term,) = drawn(fault, step, version)
        micro = step[term.rank][term.micro_batch]
        assert micro.loss_mask[term.row, term.position]
        if not isinstance(fault, NanTokenFault):
            assert pulls[term.rank][term.micro_batch][term.row, term.position] >= LEAST_SHARE * mean
        if isinstance(fault, RatioSpikeFault):
            assert micro.advantages[term.row, term.position] < 0


@pytest.mark.parametrize("fault", [GradSpikeFault(), RatioSpikeFault(), NanTokenFault()])
def test_a_single_term_is_the_same_on_any_number_of_ranks_and_micro_batches(fault: TermFault):
    steps = [step_of(ranks, tokens) for ranks in (1, 2, 3) for tokens in (24, 42, 10_000)]
    for version in range(1, 20):
        found: set[tuple[str, int]] = set()
        for step in steps:
            (term,) = drawn(fault, step, version)
            found.add((step[term.rank][term.micro_batch].trajectory_ids[term.row], term.position))
        assert len(found) == 1


def test_a_term_that_pulls_for_next_to_nothing_is_no_candidate():
    step = step_of()
    pulls = pulls_of(step)
    strongest = max(float(pull.max()) for pull in pulls[0])
    one = [[np.where(pull == strongest, pull, 1e-9 * pull) for pull in pulls[0]]]
    assert sum(int(allowed.sum()) for allowed in candidates(GradSpikeFault(), step, one)[0]) == 1
    nothing = [[np.zeros_like(pull) for pull in pulls[0]]]
    assert not any(allowed.any() for allowed in candidates(GradSpikeFault(), step, nothing)[0])


def test_every_loss_token_can_be_drawn_and_none_is_drawn_more_often_than_the_others():
    step = step_of(lengths=(4,))
    tokens = sum(int(micro.loss_mask.sum()) for micro in step[0])
    rng = np.random.default_rng(0)
    counts: dict[DrawnTerm, int] = {}
    for _ in range(200 * tokens):
        (term,) = draw_terms(NanTokenFault(), step, candidates(NanTokenFault(), step, []), rng)
        counts[term] = counts.get(term, 0) + 1
    assert len(counts) == tokens
    assert 120 < min(counts.values()) <= max(counts.values()) < 280


def test_two_spikes_stand_in_different_micro_batches_and_on_different_ranks():
    for version in range(1, 40):
        first, second = drawn(TwoSpikesFault(), step_of(ranks=2), version)
        assert first.rank != second.rank and first.micro_batch != second.micro_batch
        first, second = drawn(TwoSpikesFault(), step_of(ranks=1), version)
        assert first.micro_batch != second.micro_batch
        first, second = drawn(TwoSpikesFault(), step_of(ranks=2, micro_batch_tokens=10_000), version)
        assert first.rank != second.rank


def test_a_step_without_such_tokens_has_no_draw():
    assert drawn(TwoSpikesFault(), step_of(micro_batch_tokens=10_000)) == ()
    (micro,) = step_of(micro_batch_tokens=10_000)[0]
    micro.advantages[:] = 0
    assert drawn(GradSpikeFault(), [[micro]]) == ()
    micro.advantages[:] = 1
    assert drawn(RatioSpikeFault(), [[micro]]) == ()
    micro.loss_mask[:] = False
    assert drawn(NanTokenFault(), [[micro]]) == ()
