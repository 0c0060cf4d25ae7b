"""Correction weights against golden vectors: which bound is inclusive, what a sequence's ratio is, what a veto drops,
and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from rollout.errors import UserError
from trainer.config.consistency import (
    CorrectionConfig,
    DecoupledConfig,
    GeoRsConfig,
    IcePopConfig,
    MisSequenceConfig,
    MisTokenConfig,
    NoCorrection,
    OpsmConfig,
    SeqClipConfig,
    TisConfig,
)
from trainer.consistency.checks.mismatch import ess_fraction
from trainer.loss.corrections import CorrectionInputs, correction_weights

EVERY_CONFIG = (
    NoCorrection(),
    TisConfig(),
    IcePopConfig(),
    MisTokenConfig(),
    MisSequenceConfig(),
    SeqClipConfig(),
    GeoRsConfig(),
    OpsmConfig(),
    DecoupledConfig(),
)


def inputs(*sequences: list[float], advantage: float = 1.0, dtype: torch.dtype = torch.float64) -> CorrectionInputs:
    """Sequences of d; old - now is -d."""
    flat = torch.tensor([d for sequence in sequences for d in sequence], dtype=dtype)
    rows = torch.tensor([row for row, sequence in enumerate(sequences) for _ in sequence], dtype=torch.int64)
    return CorrectionInputs(
        log_ratio=flat,
        rows=rows,
        num_rows=len(sequences),
        advantages=torch.full_like(flat, advantage),
        old_minus_now=-flat,
    )


def weights_of_ratios(config: CorrectionConfig, ratios: list[float]) -> list[float]:
    """Weights of tokens that are each a sequence of their own."""
    return correction_weights(config, inputs(*[[math.log(ratio)] for ratio in ratios])).tolist()


def close(actual: Any, expected: Any):
    np.testing.assert_allclose(actual, expected, rtol=1e-9)


TOKEN_PRESETS: dict[str, CorrectionConfig] = {
    "tis_C2": TisConfig(cap=2.0),
    "tis_C5": TisConfig(cap=5.0),
    "icepop_0p5_5": IcePopConfig(low=0.5, high=5.0),
    "icepop_0p5_2_inclusive": IcePopConfig(low=0.5, high=2.0),
    "glm5_beta2": MisTokenConfig(low=0.5, high=2.0),
    "trl_mask_C3": MisTokenConfig(low=1e-30, high=3.0),
}


@pytest.mark.parametrize("column", list(TOKEN_PRESETS))
def test_token_weights_are_those_of_vector_v3(golden: dict[str, Any], column: str):
    vector = golden["V3_weights"]
    close(weights_of_ratios(TOKEN_PRESETS[column], vector["ratio"]), vector[column])


def test_decoupled_drops_what_is_above_its_cap_and_weighs_with_the_ratio_below(golden: dict[str, Any]):
    """As the implementation of arXiv 2505.24298 does; clamping is `tis`."""
    vector = golden["V3_weights"]
    below = [ratio if ratio <= 2.0 else 0.0 for ratio in vector["ratio"]]
    assert 0.0 in below and 2.0 in below
    close(weights_of_ratios(DecoupledConfig(cap=2.0), vector["ratio"]), below)
    close(weights_of_ratios(DecoupledConfig(), vector["ratio"]), vector["ratio"])


def test_the_batch_of_vector_v3_keeps_its_mean_and_its_effective_sample_size(golden: dict[str, Any]):
    vector = golden["V3_weights"]
    for config, key in (
        (TisConfig(cap=2.0), "ess_tis2"),
        (IcePopConfig(low=0.5, high=5.0), "ess_icepop_0p5_5"),
        (DecoupledConfig(), "ess_raw"),
    ):
        with np.errstate(divide="ignore"):
            close(ess_fraction(np.log(weights_of_ratios(config, vector["ratio"]))), vector[key])
    found = np.array(weights_of_ratios(TisConfig(cap=2.0), vector["ratio"]))
    close(found.mean(), vector["tis2_mean"])
    close(found / found.mean(), vector["tis2_batchnorm"])


@pytest.mark.parametrize("config", EVERY_CONFIG, ids=lambda config: config.type)
def test_no_weight_is_raised_to_a_lower_bound(golden: dict[str, Any], config: CorrectionConfig):
    """The lower clamp of V3's `tis_0p5_2_miles` turns 1e-30 into 0.5; here a ratio below every bound stays itself, is
    0, or is not weighed at all."""
    ratio = golden["V3_weights"]["ratio"][0]
    assert golden["V3_weights"]["tis_0p5_2_miles"][0] == 0.5 > ratio
    for unlikely in (1e-30, ratio):
        (weight,) = weights_of_ratios(config, [unlikely])
        expected = 1.0 if config.type in ("none", "opsm") else unlikely if config.type in ("tis", "decoupled") else 0.0
        close(weight, expected)


def test_a_token_band_is_inclusive_and_seq_clip_is_strict(golden: dict[str, Any]):
    boundary, strict = golden["V4_boundary"], golden["V3_weights"]["glm5_double_sided_strict_eps"]
    ratio = boundary["ratio"]
    for config in (
        IcePopConfig(low=0.5, high=2.0),
        MisTokenConfig(),
        MisSequenceConfig(high=2.0),
        GeoRsConfig(low=0.5, high=2.0),
    ):
        assert [weight > 0 for weight in weights_of_ratios(config, [ratio, 1 / ratio])] == [
            bool(boundary["inclusive_0p5_2"])
        ] * 2
    assert weights_of_ratios(SeqClipConfig(low=0.5, high=2.0), [ratio, 1 / ratio]) == [boundary["strict_0p5_2"]] * 2
    assert weights_of_ratios(SeqClipConfig(low=0.5, high=2.0), golden["V3_weights"]["ratio"]) == strict


@pytest.mark.parametrize(
    "config", [IcePopConfig(low=0.25, high=4.0), GeoRsConfig(low=0.25, high=4.0)], ids=lambda config: config.type
)
def test_a_float32_ratio_at_the_bound_is_inside_as_well(config: CorrectionConfig):
    """log 4 rounded to float32 is above log 4: the bound is rounded alike."""
    d = torch.tensor([0.25, 4.0], dtype=torch.float32).log().tolist()
    weights = correction_weights(config, inputs(d[:1], d[1:], dtype=torch.float32))
    assert weights.dtype == torch.float32
    assert (weights > 0).tolist() == [True, True]


def d_of(case: dict[str, Any]) -> list[float]:
    """The vectors write a long sequence as `[0.1]*10`."""
    if isinstance(case["d"], list):
        return case["d"]
    value, _, times = case["d"].partition("*")
    return [float(value.strip("[]"))] * int(times)


@pytest.mark.parametrize("name", list("ABCDE"))
def test_sequence_presets_are_those_of_vector_v4(golden: dict[str, Any], name: str):
    case = golden["V4_seq"][name]
    d = d_of(case)
    batch = inputs([0.0], d, [-3.0])
    own = slice(1, 1 + len(d))

    def of_case(config: CorrectionConfig) -> list[float]:
        return correction_weights(config, batch)[own].tolist()

    assert of_case(SeqClipConfig(low=0.995, high=1.005)) == [case["seqclip_995_1005_strict"]] * len(d)
    assert of_case(GeoRsConfig(low=0.999, high=1.001)) == [case["georS_999_1001"]] * len(d)
    close(of_case(MisSequenceConfig(low=1e-6, high=1e6)), [case["prod"]] * len(d))
    low, high = case["geo"] * (1 - 1e-9), case["geo"] * (1 + 1e-9)
    assert of_case(GeoRsConfig(low=low, high=high)) == of_case(SeqClipConfig(low=low, high=high)) == [1.0] * len(d)


@pytest.mark.parametrize("name", list("ABCDE"))
def test_opsm_drifts_by_the_mean_of_vector_v4(golden: dict[str, Any], name: str):
    case = golden["V4_seq"][name]
    drift = case["seq_kl_old_minus_new"]
    d = d_of(case)
    deltas = [delta for delta in (drift - 1e-9, drift + 1e-9) if delta >= 0]
    kept = [correction_weights(OpsmConfig(delta=delta), inputs(d, advantage=-1.0)).tolist() for delta in deltas]
    assert kept == ([[0.0] * len(d), [1.0] * len(d)] if deltas else [])
    assert deltas or correction_weights(OpsmConfig(delta=0.0), inputs(d, advantage=-1.0)).tolist() == [1.0] * len(d)


@pytest.mark.parametrize("case", range(5))
def test_opsm_drops_what_vector_v5_drops(golden: dict[str, Any], case: int):
    vector = golden["V5_opsm"][case]
    spread = [-vector["mean_old_minus_new"] + shift for shift in (-1e-5, 0.0, 1e-5)]
    weights = correction_weights(OpsmConfig(delta=vector["delta"]), inputs(spread, advantage=vector["A"]))
    assert weights.tolist() == [vector["keep"]] * 3


def test_a_band_of_products_grows_narrow_with_length_and_one_of_geometric_means_does_not(golden: dict[str, Any]):
    """Public fault 56: the sum of d belongs to `mis_sequence`, its mean to `geo_rs` and `seq_clip`."""
    vector, step = golden["V4_length_trap"], math.log(1.1)
    short, long = [step] * 10, [step] * 100
    for config in (GeoRsConfig(low=0.9, high=1.11), SeqClipConfig(low=0.9, high=1.11)):
        assert correction_weights(config, inputs(short, long)).tolist() == [1.0] * 110
    weights = correction_weights(MisSequenceConfig(high=3.0), inputs(short, long)).tolist()
    close(weights, [vector["r1p1_10"]] * 10 + [0.0] * 100)
    close(correction_weights(MisSequenceConfig(high=2e4), inputs(long)).tolist(), [vector["r1p1_100"]] * 100)


BANDS: tuple[CorrectionConfig, ...] = (
    IcePopConfig(low=0.5, high=5.0),
    MisTokenConfig(low=0.5, high=5.0),
    MisSequenceConfig(low=0.5, high=5.0),
    GeoRsConfig(low=0.5, high=5.0),
)


@pytest.mark.parametrize("config", BANDS, ids=lambda config: config.type)
def test_an_asymmetric_band_accepts_what_its_numbers_say(golden: dict[str, Any], config: CorrectionConfig):
    """Bounds on k1 = -log ratio would accept the mirror image, [0.2, 2]."""
    vector = golden["V4_verl_rs_inversion"]
    accepted = [weight > 0 for weight in weights_of_ratios(config, [float(ratio) for ratio in vector])]
    assert accepted == [bool(case["accepted_by_naive_reading"]) for case in vector.values()]
    assert accepted != [bool(case["accepted_by_code_0p5_5"]) for case in vector.values()]


def test_a_strict_band_differs_at_its_bounds_only(golden: dict[str, Any]):
    vector = golden["V4_verl_rs_inversion"]
    weights = dict(
        zip(
            vector, weights_of_ratios(SeqClipConfig(low=0.5, high=5.0), [float(ratio) for ratio in vector]), strict=True
        )
    )
    assert weights.pop("5.0") == 0.0
    assert weights == {ratio: case["accepted_by_naive_reading"] for ratio, case in vector.items() if ratio != "5.0"}


@pytest.mark.parametrize("config", EVERY_CONFIG, ids=lambda config: config.type)
def test_a_veto_composes_with_every_correction(config: CorrectionConfig):
    batch = inputs([0.001, 0.002], [0.001, -17.0, 0.0], [0.0])
    vetoed = correction_weights(config.model_copy(update={"veto": 1e-4}), batch)
    assert vetoed[2:5].tolist() == [0.0] * 3
    plain = correction_weights(config, batch)
    assert torch.equal(vetoed[[0, 1, 5]], plain[[0, 1, 5]])


def test_the_veto_is_that_of_vector_v2(golden: dict[str, Any]):
    vector, config = golden["V2_tokens"], NoCorrection(veto=1e-4)
    d = vector["log_ratio"]
    for last, key in ((d[5], "veto_1e4"), (-17.0, "veto_1e4_if_last_minus17")):
        weights = correction_weights(config, inputs(d[:4], [d[4], last]))
        assert weights.tolist() == [1.0] * 4 + ([0.0, 0.0] if vector[key] else [1.0, 1.0])


def test_a_ratio_at_the_veto_stays():
    weights = correction_weights(NoCorrection(veto=1e-4), inputs([math.log(1e-4)], [math.log(0.99e-4)]))
    assert weights.tolist() == [1.0, 0.0]


def test_a_sequence_is_its_tokens_in_whatever_order_they_lie():
    generator = torch.Generator().manual_seed(0)
    rows, d = (
        torch.randint(4, (40,), generator=generator),
        torch.randn(40, generator=generator, dtype=torch.float64) * 0.01,
    )
    batch = CorrectionInputs(log_ratio=d, rows=rows, num_rows=5, advantages=-torch.ones_like(d), old_minus_now=d)
    product = correction_weights(MisSequenceConfig(low=0.01, high=100.0), batch)
    drift = correction_weights(OpsmConfig(delta=1e-4), batch)
    for row in range(4):
        close(product[rows == row], [math.exp(d[rows == row].sum().item())] * int((rows == row).sum()))
        assert set(drift[rows == row].tolist()) == {0.0 if d[rows == row].mean().item() > 1e-4 else 1.0}


@pytest.mark.parametrize("config", EVERY_CONFIG, ids=lambda config: config.type)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_carry_no_graph_and_no_tokens_have_no_weights(config: CorrectionConfig, dtype: torch.dtype):
    batch = inputs([0.001, -0.002], dtype=dtype)
    leaf = batch.log_ratio.requires_grad_()
    weights = correction_weights(config, batch)
    assert (weights.requires_grad, weights.shape, weights.dtype, leaf.grad) == (False, (2,), dtype, None)
    assert correction_weights(config.model_copy(update={"veto": 1e-4}), inputs()).shape == (0,)


READERS: tuple[CorrectionConfig, ...] = (
    *(config for config in EVERY_CONFIG if config.type != "none"),
    NoCorrection(veto=1e-4),
)


@pytest.mark.parametrize("config", READERS, ids=lambda config: config.type)
def test_a_log_ratio_that_is_not_finite_is_refused_and_counted(config: CorrectionConfig):
    with pytest.raises(ValueError, match="2 of 4 loss tokens"):
        correction_weights(config, inputs([0.0, math.nan], [-math.inf, 0.1], advantage=-1.0))


@pytest.mark.parametrize(
    "config",
    [TisConfig(), IcePopConfig(), MisTokenConfig(), MisSequenceConfig(), DecoupledConfig(cap=2.0)],
    ids=lambda c: c.type,
)
def test_an_exploding_ratio_is_capped_or_masked_and_never_infinite(config: CorrectionConfig):
    """Public fault 56: e^120 is beyond float32."""
    weights = correction_weights(config, inputs([120.0], [-120.0], dtype=torch.float32))
    assert bool(torch.isfinite(weights).all())
    assert weights[0].item() == (2.0 if config.type == "tis" else 0.0)


def test_an_unbounded_weight_beyond_the_float_range_names_its_cure():
    with pytest.raises(UserError, match=r"1 of 2 weights exceed torch.float32; set consistency.correction.cap"):
        correction_weights(DecoupledConfig(), inputs([120.0, 0.0], dtype=torch.float32))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", torch.zeros(2, dtype=torch.int32), "expected torch.int64"),
        ("advantages", torch.zeros(3), "expected one"),
        ("old_minus_now", torch.zeros(2, 1), "expected one"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(field: str, value: Tensor, message: str):
    fitting = {
        "log_ratio": torch.zeros(2),
        "rows": torch.zeros(2, dtype=torch.int64),
        "advantages": torch.zeros(2),
        "old_minus_now": torch.zeros(2),
    }
    with pytest.raises(ValueError, match=message):
        CorrectionInputs(**{**fitting, field: value}, num_rows=1)


def test_every_preset_of_the_config_has_weights():
    """A preset that is added to the union must be added here, and then to the mathematics."""
    names = TypeAdapter(CorrectionConfig).json_schema()["discriminator"]["mapping"]
    assert set(names) == {config.type for config in EVERY_CONFIG}
