"""Clips with a memory: the golden vectors, what spikes may do to later steps, and states that survive JSON."""

import json
import math
from typing import Any

import pytest
from support.paths import GOLDEN_FOLDER

from rollout.errors import ConcordError, UserError
from trainer.config.trainer import AdaGCConfig, LayerClipConfig, ZClipConfig
from trainer.optim.adagc import AdaGC
from trainer.optim.clipping import Clip, NoMemoryClip
from trainer.optim.layerclip import LayerClip
from trainer.optim.zclip import ZClip

VECTORS: dict[str, Any] = json.loads((GOLDEN_FOLDER / "golden_vectors.json").read_text())
LAYERCLIP = VECTORS["V9_layerclip"]


def exactly(value: float) -> Any:
    """The vectors hold 12 digits."""
    return pytest.approx(value, rel=5e-12)


def layerclip(mode: Any, **changes: Any) -> LayerClip:
    settings: dict[str, Any] = {
        "mode": mode,
        "alpha": LAYERCLIP["alpha"],
        "beta": LAYERCLIP["beta"],
        "eps": 0.0,
        "warmup_steps": 1,
    }
    return LayerClip(["block"], LayerClipConfig.model_construct(**settings | changes))


def adagc(names: list[str], max_norm: float = math.inf, **settings: Any) -> AdaGC:
    return AdaGC(names, AdaGCConfig(**settings), max_norm)


def scale_of(clip: Clip, norm: float) -> float:
    return clip.decide([norm]).scales[0]


@pytest.mark.parametrize(
    ("trace", "mode"),
    [
        ("A_blog_R0_is_g1", "paper_ema"),
        ("B_blog_R0_zero", "paper_ema"),
        ("D_lagged_clipped_update", "lagged"),
        ("E_ca_blog", "paper_ca"),
    ],
)
def test_layerclip_follows_its_vectors(trace: str, mode: str):
    clip = layerclip(mode)
    if trace == "B_blog_R0_zero":
        clip.load_state_dict({"references": {"block": 0.0}, "seen": {"block": 0}})
    for row in LAYERCLIP[trace]:
        decision = clip.decide([row["g"]])
        assert decision.scales[0] == exactly(row["scale"])
        assert decision.scales[0] * row["g"] == exactly(row["out"])
        assert clip.state_dict()["references"]["block"] == exactly(row["R"])
        assert decision.thresholds[0] == (None if row["tau"] is None else exactly(row["tau"]))


def test_the_published_mean_clips_only_above_its_own_shifted_threshold_and_never_when_the_spike_lifts_it_enough():
    rule = LAYERCLIP["clip_iff"]
    for norm, clipped in ((rule["g_threshold"] * 0.999, False), (rule["g_threshold"] * 1.001, True)):
        clip = layerclip("paper_ema")
        clip.decide([rule["Rprev"]])
        assert (scale_of(clip, norm) < 1) == clipped
    never = layerclip("paper_ema", beta=0.5)
    assert LAYERCLIP["never_clips_when_alpha_1mb_ge_1"] <= 2.0 * (1 - 0.5)
    assert [scale_of(never, norm) for norm in (1.0, 1e6, 1e12)] == [1.0, 1.0, 1.0]


def test_layerclip_leaves_blocks_alone_that_the_global_clip_would_shrink():
    vector = VECTORS["V9_global_vs_layer"]
    norms = {name: math.hypot(*gradient) for name, gradient in vector["layers"].items()}
    whole = math.hypot(*norms.values())
    assert whole == exactly(vector["global_norm"])
    assert 1 / whole == exactly(vector["global_scale_maxnorm1"])
    assert norms["l1"] / whole == exactly(vector["l1_after_global"])
    rows = vector["layer_scale_with_R"]
    clip = LayerClip(list(norms), LayerClipConfig(alpha=2.0, eps=0.0))
    clip.load_state_dict(
        {"references": {name: row["R"] for name, row in rows.items()}, "seen": dict.fromkeys(rows, 20)}
    )
    assert list(clip.decide(list(norms.values())).scales) == [exactly(row["scale"]) for row in rows.values()]


def test_layerclip_only_observes_while_it_warms_up_and_starts_from_the_mean():
    clip = layerclip("lagged", warmup_steps=4)
    assert [scale_of(clip, norm) for norm in (1.0, 2.0, 50.0, 3.0)] == [1.0] * 4
    assert clip.state_dict()["references"]["block"] == pytest.approx(14.0)
    assert scale_of(clip, 56.0) == pytest.approx(0.5)


def test_a_spike_raises_the_lagged_threshold_by_a_bounded_factor_whatever_its_size():
    clip = layerclip("lagged")
    clip.decide([1.0])
    assert scale_of(clip, 1e9) == pytest.approx(2e-9)
    assert clip.state_dict()["references"]["block"] == pytest.approx(1.1)


def test_a_spike_of_ten_raises_the_lagged_threshold_less_than_an_unclipped_update_would():
    clip, spiked = layerclip("lagged"), False
    for row in LAYERCLIP["C_lagged_raw"]:
        threshold = clip.decide([row["g"]]).thresholds[0]
        assert threshold is None or (threshold < row["tau"] if spiked else threshold == exactly(row["tau"]))
        spiked = spiked or row["g"] > 1.0
    assert spiked


@pytest.mark.parametrize("clip", [layerclip("lagged", warmup_steps=3), adagc(["block"], warmup_steps=3)])
def test_steps_without_a_gradient_do_not_freeze_a_block(clip: Clip):
    scales = [scale_of(clip, norm) for norm in (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0)]
    assert scales == [1.0] * 10


def test_blocks_do_not_share_a_history():
    clip = LayerClip(["calm", "wild"], LayerClipConfig(warmup_steps=1, eps=0.0))
    clip.decide([1.0, 100.0])
    assert clip.decide([4.0, 100.0]).scales == (0.5, 1.0)


def test_zclip_follows_its_vectors():
    for name, norm in (("spike", 5.0), ("ok", 1.4)):
        row = VECTORS["V10_zclip"][name]
        clip = ZClip(["block"], ZClipConfig())
        clip.load_state_dict({"mean": 1.0, "variance": 0.04, "seen": 25})
        assert (norm - 1.0) / (0.2 + 1e-6) == exactly(row["z"])
        assert scale_of(clip, norm) == pytest.approx(row["scale"], rel=1e-9)
        if row["threshold"] is not None:
            assert row["threshold"] / (norm + 1e-6) == pytest.approx(row["scale"], rel=1e-9)
        state = clip.state_dict()
        assert state["mean"] == exactly(row["mean"])
        assert state["variance"] == exactly(row["var"])


def test_zclip_warms_up_on_mean_and_variance_of_the_global_norm():
    clip = ZClip(["one", "two"], ZClipConfig(warmup_steps=3))
    for whole in (5.0, 10.0, 15.0):
        assert clip.decide([0.6 * whole, 0.8 * whole]).scales == (1.0, 1.0)
    assert clip.state_dict()["mean"] == pytest.approx(10.0)
    assert clip.state_dict()["variance"] == pytest.approx(50 / 3)
    assert len(set(clip.decide([600.0, 800.0]).scales)) == 1
    assert clip.decide([600.0, 800.0]).scales[0] < 0.02


def test_adagc_follows_its_vector():
    vector = VECTORS["V10_adagc"]
    clip = adagc(["block"], lam=vector["lam"], beta=vector["beta"])
    clip.load_state_dict({"references": {"block": vector["gamma0"]}, "seen": 100})
    for row in vector["trace"]:
        assert scale_of(clip, row["g"]) == exactly(row["scale"])
        assert clip.state_dict()["references"]["block"] == exactly(row["gamma"])


def test_adagc_starts_from_the_smallest_norm_behind_the_global_clip():
    clip = adagc(["one", "two"], max_norm=1.0, warmup_steps=2)
    clip.decide([3.0, 4.0])
    clip.decide([0.9, 0.1])
    assert clip.state_dict()["references"] == {"one": pytest.approx(0.6), "two": pytest.approx(0.1)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerClip(["one", "two"], LayerClipConfig(warmup_steps=2)),
        lambda: LayerClip(["one", "two"], LayerClipConfig(mode="paper_ca")),
        lambda: ZClip(["one", "two"], ZClipConfig(warmup_steps=2)),
        lambda: adagc(["one", "two"], warmup_steps=2),
        lambda: NoMemoryClip(["one", "two"]),
    ],
)
def test_a_clip_goes_on_from_the_json_of_its_state(make: Any):
    norms = [(1.0, 2.0), (1.5, 2.5), (90.0, 2.0), (1.0, 70.0), (1.0, 1.0)]
    unbroken, first, second = make(), make(), make()
    expected = [unbroken.decide(norm) for norm in norms]
    got = [first.decide(norm) for norm in norms[:3]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert got + [second.decide(norm) for norm in norms[3:]] == expected


@pytest.mark.parametrize("clip", [LayerClip(["one"], LayerClipConfig()), adagc(["one"])])
def test_the_state_of_another_model_is_refused(clip: Any):
    two = ["one", "two"]
    state = (LayerClip(two, LayerClipConfig()) if isinstance(clip, LayerClip) else adagc(two)).state_dict()
    with pytest.raises(UserError, match=r"other blocks \(two .* checkpoint of this model"):
        clip.load_state_dict(state)


@pytest.mark.parametrize(
    "clip",
    [LayerClip(["one"], LayerClipConfig()), adagc(["one"]), ZClip(["one"], ZClipConfig()), NoMemoryClip(["one"])],
)
@pytest.mark.parametrize("norms", [[math.nan], [math.inf], [-1.0], [1.0, 1.0]])
def test_a_clip_learns_nothing_from_norms_that_are_none(clip: Clip, norms: list[float]):
    before = clip.state_dict()
    with pytest.raises(ConcordError, match=r"expected a finite one|one a block"):
        clip.decide(norms)
    assert clip.state_dict() == before
