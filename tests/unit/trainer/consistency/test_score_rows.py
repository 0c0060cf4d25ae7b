"""How prefixes are packed, truncated distributions, and rounded weights: the parts of scoring that need no trainer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.builders import build_trajectory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rollout.engines.sampling.sampling import RowSampling
from rollout.types.generation import SamplingParams
from rollout.types.weights import PolicyVersion
from trainer.config.trainer import TinyModelConfig
from trainer.consistency.scoring.moments import token_moments
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.rows import Sampler, ScoreRow, batches_of, prefix_rows
from trainer.consistency.scoring.weight_formats import conversion, round_to_float8
from trainer.model.logprobs import chunked_logprobs
from trainer.tiny.model import tiny_architecture
from trainer.types.support import Truncation, support_of


def rows_of(lengths: Sequence[int]) -> list[ScoreRow]:
    rows: list[ScoreRow] = []
    for index, length in enumerate(lengths):
        item = build_trajectory(index=index, prompt_tokens=3, spans=((PolicyVersion(1, 1), length - 2),))
        rows += prefix_rows(index, item, [(span, span.policy) for span in item.version_spans]).values()
    return rows


def truncated_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, sampler: Sampler, chunk: int) -> Tensor:
    """Log-probs over what top-k and top-p leave of these logits."""
    truncation = Truncation(top_p=sampler.top_p, top_k=sampler.top_k) if sampler.truncates else None
    support = support_of([(truncation, np.arange(targets.numel()))])
    return chunked_logprobs(hidden, head, targets, sampler.temperature, chunk, support)[0]


@pytest.mark.parametrize("budget", [1, 40, 100, 10_000])
def test_batches_hold_every_row_once_within_the_budget(budget: int):
    lengths = np.random.default_rng(1).integers(3, 60, size=50).tolist()
    batches = batches_of(rows_of(lengths), budget)
    assert sorted(row.index for batch in batches for row in batch.rows) == list(range(50))
    for batch in batches:
        assert batch.token_ids.size <= budget or len(batch.rows) == 1
        assert batch.token_ids.shape[1] == max(row.length for row in batch.rows)
    if budget == 10_000:
        assert len(batches) == 1


def test_positions_point_at_the_input_before_each_target():
    for batch in batches_of(rows_of([9, 4, 7, 3]), 20):
        ends = np.cumsum([row.targets.size for row in batch.rows])
        flat = batch.token_ids.reshape(-1)
        for row, end in zip(batch.rows, ends, strict=True):
            part = slice(end - row.targets.size, end)
            np.testing.assert_array_equal(flat[batch.positions[part]], row.trajectory.token_ids[row.targets - 1])
            np.testing.assert_array_equal(batch.targets[part], row.trajectory.token_ids[row.targets])


def test_a_trajectory_has_one_row_a_policy_up_to_its_last_token():
    old, new = PolicyVersion(1, 1), PolicyVersion(1, 2)
    item = build_trajectory(prompt_tokens=3, spans=((old, 2), (new, 3), (old, 1), (new, 4)))
    rows = prefix_rows(0, item, [(span, span.policy) for span in item.version_spans])
    assert {policy: (row.start, row.end, row.targets.tolist()) for policy, row in rows.items()} == {
        old: (0, 8, [3, 4, 8]),
        new: (0, 12, [5, 6, 7, 9, 10, 11, 12]),
    }


def test_the_distribution_is_the_tags_unless_asked_otherwise():
    tag = replace(build_trajectory().tag, temperature=0.8, top_p=0.9, top_k=7)
    assert Sampler.of(tag, ScoreOptions()) == Sampler(0.8, 0.9, 7)
    assert Sampler.of(tag, ScoreOptions(truncate=False)) == Sampler(0.8)
    assert Sampler.of(tag, ScoreOptions(temperature=1.0, truncate=False)) == Sampler()


def test_golden_temperatures(golden: dict[str, Any]):
    for temperature, expected in golden["V12_temperature"].items():
        logits, target = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64), torch.tensor([0])
        head = torch.eye(3, dtype=torch.float64)
        for key, used in (("raw", 1.0), ("processed", float(temperature))):
            ours = truncated_logprobs(logits, head, target, Sampler(used), 4)
            assert float(ours) == pytest.approx(expected[key], rel=1e-9)
            torch.testing.assert_close(ours, chunked_logprobs(logits, head, target, used, 4)[0], rtol=1e-12, atol=1e-12)


def test_golden_renormalisation_over_the_kept_tokens(golden: dict[str, Any]):
    vector = golden["V12_topmask"]
    logits = torch.tensor([vector["logits"]], dtype=torch.float64)
    head, target = torch.eye(5, dtype=torch.float64), torch.tensor([vector["token"]])
    assert float(truncated_logprobs(logits, head, target, Sampler(), 4)) == pytest.approx(vector["logp_full"], rel=1e-9)
    cut = torch.ones(5, dtype=torch.bool)
    cut[vector["keep"]] = False
    masked = truncated_logprobs(logits.masked_fill(cut, -50.0), head, target, Sampler(top_k=len(vector["keep"])), 4)
    assert float(masked) == pytest.approx(vector["logp_mask"], rel=1e-9)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.6, 0), (1.0, 5), (0.7, 6), (1e-6, 0), (1.0, 1), (0.9, 500)])
def test_truncated_logprobs_are_those_of_the_engine(top_p: float, top_k: int):
    generator = torch.Generator().manual_seed(4)
    hidden, head = torch.randn(40, 6, generator=generator), torch.randn(30, 6, generator=generator)
    params = SamplingParams(max_new_tokens=1, temperature=0.9, top_p=top_p, top_k=top_k)
    engine = RowSampling.of([params] * 40, 30, torch.device("cpu")).processed_logprobs(hidden @ head.t())
    likely, rim = engine.argmax(dim=-1), torch.randint(30, (40,), generator=generator)
    for targets in (likely, rim):
        ours = truncated_logprobs(hidden, head, targets, Sampler(0.9, top_p, top_k), 16)
        theirs = engine.gather(1, targets[:, None]).squeeze(1)
        drawn = torch.isfinite(theirs)
        torch.testing.assert_close(ours[drawn], theirs[drawn], rtol=1e-5, atol=1e-5)
        # One that was drawn all the same joins the kept ones.
        scaled = (hidden @ head.t() / 0.9).masked_fill(torch.isinf(engine), -torch.inf)
        own = (hidden @ head.t() / 0.9).gather(1, targets[:, None]).squeeze(1)
        joined = own - torch.logaddexp(torch.logsumexp(scaled, -1), own)
        torch.testing.assert_close(ours[~drawn], joined[~drawn], rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            self.numel = max(self.numel, part.numel() if isinstance(part, Tensor) else 0)
        return result


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(top_k=5), Sampler(top_p=0.5)])
def test_logits_of_no_more_than_a_chunk_exist_at_once(sampler: Sampler):
    hidden, head, targets = torch.ones(64, 4), torch.ones(100, 4), torch.zeros(64, dtype=torch.int64)
    with LargestTensor() as largest:
        truncated_logprobs(hidden, head, targets, sampler, 8)
        token_moments(hidden, head, targets, sampler, 8)
    assert largest.numel <= 8 * 100


def test_float8_has_three_bits_of_mantissa_and_one_scale_a_matrix():
    assert round_to_float8(torch.tensor([[448.0, 17.0, -19.0, 0.0]])).tolist() == [[448.0, 16.0, -20.0, 0.0]]
    stack = torch.tensor([[[448.0, 17.0]], [[4.48, 0.17]]])  # two experts
    torch.testing.assert_close(round_to_float8(stack), torch.tensor([[[448.0, 16.0]], [[4.48, 0.16]]]))
    assert not round_to_float8(torch.zeros(2, 2)).any()


@pytest.mark.parametrize("moe", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_float8_spares_embedding_head_and_vectors(moe: bool, tied: bool):
    model = tiny_architecture(TinyModelConfig(moe=moe, tie_embeddings=tied))
    convert = conversion(model, ScoreOptions(weights_dtype="float8_e4m3"), torch.float32)
    assert convert is not None
    spared = {
        name
        for name, parameter in model.named_parameters()
        if torch.equal(convert(name, parameter.detach()), parameter)
    }
    assert spared == {
        name for name, _ in model.named_parameters() if "norm" in name or "embed" in name or "lm_head" in name
    }


def test_what_is_asked_for_already_needs_no_conversion():
    model = tiny_architecture(TinyModelConfig())
    assert conversion(model, ScoreOptions(), torch.bfloat16) is None
    assert conversion(model, ScoreOptions(dtype="float32"), torch.float32) is None
    convert = conversion(model, ScoreOptions(dtype="float32"), torch.bfloat16)
    assert convert is not None
    assert convert("model.norm.weight", torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
