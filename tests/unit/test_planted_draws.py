"""Which steps and which token terms a planted gradient fault hits."""

import numpy as np
import pytest
from trainer_room import stored

from rollout.faults.gradient_config import GradSpikeFault, NanTokenFault, RatioSpikeFault, TermFault, TwoSpikesFault
from trainer.algorithms.grpo import Grpo
from trainer.batcher import build_batch
from trainer.config import GrpoConfig
from trainer.consistency.evidence import audited_group
from trainer.packing import pack
from trainer.planted.draws import LEAST_SURPRISE_NATS, DrawnTerm, StepBatches, draw_terms, generator


def step_of(ranks: int = 1, micro_batch_tokens: int = 42, lengths: tuple[int, ...] = (3, 11, 6)) -> StepBatches:
    groups = stored(lengths=lengths)
    audited = [audited_group(payload, verdict) for payload, verdict in zip(groups.payloads, groups.verdicts, strict=True)]
    return pack(build_batch(audited, Grpo(GrpoConfig()), 0, "token_mean").samples, ranks, micro_batch_tokens)


def drawn(fault: TermFault, step: StepBatches, version: int = 5, seed: int = 0) -> tuple[DrawnTerm, ...]:
    return draw_terms(fault, step, generator(seed, fault.type, 0, version))


@pytest.mark.parametrize(
    ("start", "every", "hit"),
    [(3, 0, [3]), (3, 2, [3, 5, 7, 9]), (1, 4, [1, 5, 9]), (1, 1, list(range(1, 11)))],
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
    for version in range(1, 60):
        (term,) = drawn(fault, step, version)
        micro = step[term.rank][term.micro_batch]
        assert micro.loss_mask[term.row, term.position]
        if not isinstance(fault, NanTokenFault):
            assert micro.rollout_logprobs[term.row, term.position] < -LEAST_SURPRISE_NATS
            assert micro.advantages[term.row] != 0
        if isinstance(fault, RatioSpikeFault):
            assert micro.advantages[term.row] < 0


def test_every_loss_token_can_be_drawn_and_none_is_drawn_more_often_than_the_others():
    step = step_of(lengths=(4,))
    tokens = sum(int(micro.loss_mask.sum()) for micro in step[0])
    rng = np.random.default_rng(0)
    counts: dict[DrawnTerm, int] = {}
    for _ in range(200 * tokens):
        (term,) = draw_terms(NanTokenFault(), step, rng)
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
