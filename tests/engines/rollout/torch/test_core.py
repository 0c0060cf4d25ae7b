"""The torch engine, step by step: exact log-probs, version spans where the update was, KV rebuilt or kept, admission,
limits."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.trainer.torch_models import (
    Reference,
    by_sample,
    core_of,
    logprobs_of,
    manifest_of,
    request_of,
    run_dry,
    save_random_model,
    tokens_of,
)

from rollout.errors import EngineError, UserError
from rollout.types.generation import PauseMode, SamplingParams
from rollout.types.trajectory import FinishReason

PROMPTS = {"a": [3, 4, 12, 5, 6, 14], "b": [7, 2, 12], "c": [9, 9, 9, 9, 9, 9, 9, 9, 9, 12]}
LONG = SamplingParams(max_new_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["tied", "untied", "moe"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two policies of one architecture."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp(kind)
    old, new = (
        save_random_model(folder / name, seed, moe=kind == "moe", tied=kind == "tied")
        for seed, name in enumerate(("old", "new"))
    )
    return old, new


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("dense")
    return save_random_model(folder / "old", 0), save_random_model(folder / "new", 1)


def test_logprobs_are_those_of_a_plain_forward_pass(models: tuple[Path, Path]):
    core, reference = core_of(models[0]), Reference(models[0])
    for name, prompt in PROMPTS.items():
        core.submit(request_of(name, prompt, seeds=(1, 2, 3)))
    gaps = [
        np.abs(logprobs_of(chunks) - reference.logprobs(PROMPTS[name], tokens_of(chunks)))
        for (name, _), chunks in by_sample(run_dry(core)).items()
    ]
    assert len(gaps) == 9
    assert np.concatenate(gaps).mean() < 2e-6
    assert np.concatenate(gaps).max() < 5e-5


def test_after_a_recompute_every_logprob_belongs_to_the_weights_of_its_version(models: tuple[Path, Path]):
    core = core_of(models[0])
    references = {0: Reference(models[0]), 1: Reference(models[1])}
    for name, prompt in PROMPTS.items():
        core.submit(request_of(name, prompt, sampling=LONG))
    steps_before = 5
    early = [sample for _ in range(steps_before) for sample in core.step()]
    core.pause(PauseMode.RECOMPUTE)
    report = core.apply(manifest_of(models[1], 1))
    core.resume()
    done = by_sample(run_dry(core))
    assert not early and report.interrupted == 3
    for (name, _), chunks in done.items():
        assert [(chunk.policy.version, chunk.token_ids.size) for chunk in chunks] == [
            (0, steps_before),
            (1, 16 - steps_before),
        ]
        tokens = tokens_of(chunks)
        expected = {version: reference.logprobs(PROMPTS[name], tokens) for version, reference in references.items()}
        assert np.abs(chunks[0].logprobs - expected[0][:steps_before]).max() < 5e-5
        assert np.abs(chunks[1].logprobs - expected[1][steps_before:]).max() < 5e-5
        assert np.abs(expected[0] - expected[1]).max() > 0.1  # the two policies can be told apart


def test_kept_kv_leaves_logprobs_that_no_weights_reproduce(dense: tuple[Path, Path]):
    gaps: dict[PauseMode, float] = {}
    for mode in (PauseMode.KEEP, PauseMode.RECOMPUTE):
        core = core_of(dense[0])
        core.submit(request_of("a", PROMPTS["a"], sampling=LONG))
        for _ in range(8):
            core.step()
        core.pause(mode)
        core.apply(manifest_of(dense[1], 1))
        core.resume()
        chunks = by_sample(run_dry(core))["a", 0]
        assert chunks[1].policy.version == 1
        gaps[mode] = float(
            np.abs(chunks[1].logprobs - Reference(dense[1]).logprobs(PROMPTS["a"], tokens_of(chunks))[8:]).max()
        )
    assert gaps[PauseMode.RECOMPUTE] < 5e-5
    assert gaps[PauseMode.KEEP] > 1e-2


def test_a_drain_finishes_accepted_requests_and_holds_new_ones(dense: tuple[Path, Path]):
    core = core_of(dense[0], max_num_seqs=2)
    for name in ("a", "b"):
        core.submit(request_of(name, PROMPTS[name], sampling=LONG))
    core.step()
    core.pause(PauseMode.DRAIN)
    core.submit(request_of("c", PROMPTS["c"], sampling=LONG))
    with pytest.raises(EngineError, match="pause the engine first"):
        core.apply(manifest_of(dense[1], 1))
    drained = by_sample(run_dry(core))
    assert core.sampling_has_stopped and {name for name, _ in drained} == {"a", "b"}
    core.apply(manifest_of(dense[1], 1))
    core.resume()
    after = by_sample(run_dry(core))
    assert {chunk.policy.version for chunks in drained.values() for chunk in chunks} == {0}
    assert {chunk.policy.version for chunks in after.values() for chunk in chunks} == {1}
    assert {name for name, _ in after} == {"c"}


def test_every_parameter_arrives_with_an_update(models: tuple[Path, Path]):
    core = core_of(models[0])
    core.pause(PauseMode.RECOMPUTE)
    manifest = manifest_of(models[1], 1)
    assert core.apply(manifest).digest == manifest.digest
    ids = np.array(PROMPTS["c"], dtype=np.int32)
    assert np.abs(core.score(ids) - Reference(models[1]).logprobs([int(ids[0])], ids[1:])).max() < 5e-5


def test_a_score_is_raw_whatever_requests_sample_with(dense: tuple[Path, Path]):
    core = core_of(dense[0])
    core.submit(request_of("a", PROMPTS["a"], sampling=SamplingParams(max_new_tokens=4, temperature=0.5, top_k=3)))
    core.step()
    ids = np.array(PROMPTS["c"] * 3, dtype=np.int32)
    assert np.abs(core.score(ids) - Reference(dense[0]).logprobs([int(ids[0])], ids[1:])).max() < 5e-5


def test_a_sample_does_not_depend_on_its_batch(dense: tuple[Path, Path]):
    alone: dict[tuple[str, int], list[int]] = {}
    for name, prompt in PROMPTS.items():
        core = core_of(dense[0])
        core.submit(request_of(name, prompt))
        alone |= {key: tokens_of(chunks).tolist() for key, chunks in by_sample(run_dry(core)).items()}
    core, done = core_of(dense[0]), []
    for name, prompt in PROMPTS.items():
        core.submit(request_of(name, prompt))
        done += core.step() + core.step()
    together = {key: tokens_of(chunks).tolist() for key, chunks in by_sample(done + run_dry(core)).items()}
    assert together == alone
    assert len({tuple(tokens) for tokens in alone.values()}) > 3


def test_deterministic_results_are_bit_identical_whatever_the_arrival(dense: tuple[Path, Path]):
    results: list[dict[tuple[str, int], bytes]] = []
    for names, pauses in ((("a", "b", "c"), 0), (("c", "a", "b"), 3)):
        core, done = core_of(dense[0], deterministic=True), []
        for name in names:
            core.submit(request_of(name, PROMPTS[name], seeds=(1, 2, 3)))
            done += [sample for _ in range(pauses) for sample in core.step()]
        results.append({key: logprobs_of(chunks).tobytes() for key, chunks in by_sample(done + run_dry(core)).items()})
    assert results[0] == results[1]


def test_a_continued_sample_goes_on_as_if_it_had_not_been_cut(dense: tuple[Path, Path]):
    core = core_of(dense[0])
    core.submit(request_of("a", PROMPTS["a"], seeds=(5,), sampling=LONG))
    whole = by_sample(run_dry(core))["a", 0]
    core.submit(request_of("a", PROMPTS["a"], seeds=(5,), sampling=LONG), tokens_of(whole)[:7])
    rest = by_sample(run_dry(core))["a", 0]
    assert tokens_of(rest).tolist() == tokens_of(whole)[7:].tolist()
    assert np.abs(logprobs_of(rest) - logprobs_of(whole)[7:]).max() < 5e-5


def test_an_abort_ends_a_request_where_it_stands_and_leaves_the_others(dense: tuple[Path, Path]):
    core = core_of(dense[0], max_num_seqs=4)
    for name in ("a", "b", "c"):
        core.submit(request_of(name, PROMPTS[name], sampling=LONG))
    for _ in range(3):
        core.step()
    running, waiting = core.abort("a"), core.abort("c")
    assert [(tokens_of(sample.chunks).size, sample.chunks[-1].finish_reason) for sample in running] == [
        (3, FinishReason.ABORT)
    ] * 2
    assert [tokens_of(sample.chunks).size for sample in waiting] == [0, 0]
    left = by_sample(run_dry(core))
    gaps = [
        np.abs(logprobs_of(chunks) - Reference(dense[0]).logprobs(PROMPTS["b"], tokens_of(chunks))).max()
        for chunks in left.values()
    ]
    assert {name for name, _ in left} == {"b"} and max(gaps) < 5e-5


def test_no_more_rows_than_max_num_seqs_are_decoded_and_requests_wait_in_order(dense: tuple[Path, Path]):
    core = core_of(dense[0], max_num_seqs=3)
    for i in range(4):
        core.submit(request_of(f"r{i}", PROMPTS["a"], sampling=SamplingParams(max_new_tokens=3, ignore_eos=True)))
    order: list[str] = []
    while core.can_step:
        order += [sample.request_id for sample in core.step()]
        assert core._num_live <= 3
    assert order == ["r0", "r0", "r1", "r1", "r2", "r2", "r3", "r3"]


def test_a_request_of_more_samples_than_rows_is_served_in_pieces(dense: tuple[Path, Path]):
    core = core_of(dense[0], max_num_seqs=2)
    core.submit(request_of("a", PROMPTS["a"], seeds=(1, 2, 3, 4, 5)))
    assert {index for _, index in by_sample(run_dry(core))} == {0, 1, 2, 3, 4}


def test_a_sample_ends_with_its_stop_token_unless_told_to_ignore_it(dense: tuple[Path, Path]):
    every_id = tuple(range(32))
    core = core_of(dense[0])
    core.submit(request_of("stops", PROMPTS["a"], eos_ids=every_id))
    core.submit(request_of("goes on", PROMPTS["a"], eos_ids=every_id, sampling=LONG))
    ends = {key: (tokens_of(chunks).size, chunks[-1].finish_reason) for key, chunks in by_sample(run_dry(core)).items()}
    assert ends["stops", 0] == (1, FinishReason.STOP)
    assert ends["goes on", 0] == (16, FinishReason.LENGTH)


def test_a_sample_ends_where_the_context_ends(dense: tuple[Path, Path]):
    core = core_of(dense[0], max_model_len=10)
    core.submit(request_of("a", PROMPTS["a"], sampling=LONG))
    assert [tokens_of(chunks).size for chunks in by_sample(run_dry(core)).values()] == [4, 4]
    with pytest.raises(UserError, match="10 prompt tokens and 0 produced ones leave no room"):
        core.submit(request_of("b", PROMPTS["c"]))


def test_token_ids_that_the_model_does_not_have_are_refused(dense: tuple[Path, Path]):
    core = core_of(dense[0])
    with pytest.raises(UserError, match="from 3 to 32; the model knows 0 to 31"):
        core.submit(request_of("a", [3, 32]))


def test_rows_of_a_cache_that_grew_keep_their_keys(dense: tuple[Path, Path]):
    core, reference = core_of(dense[0]), Reference(dense[0])
    sampling = SamplingParams(max_new_tokens=150, ignore_eos=True)
    core.submit(request_of("first", PROMPTS["a"], sampling=sampling))
    for _ in range(100):
        core.step()
    core.submit(
        request_of(
            "late", PROMPTS["c"], seeds=tuple(range(9)), sampling=SamplingParams(max_new_tokens=20, ignore_eos=True)
        )
    )
    for (name, _), chunks in by_sample(run_dry(core)).items():
        prompt = PROMPTS["a"] if name == "first" else PROMPTS["c"]
        assert np.abs(logprobs_of(chunks) - reference.logprobs(prompt, tokens_of(chunks))).max() < 1e-4
