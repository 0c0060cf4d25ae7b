"""The config of clips and of Muon: what each kind becomes, and mistakes named with their cure."""

import pytest

from orchestrator.config import RunConfig, parse_config
from rollout.errors import UserError
from trainer.optim.clip_registry import build_clip
from trainer.optim.clipping import Clip, NoMemoryClip
from trainer.optim.layerclip import LayerClip


def parse(*overrides: str) -> RunConfig:
    return parse_config({}, "test", [f"trainer.optimizer.{override}" for override in overrides])


def clip_of(*overrides: str) -> Clip:
    config = parse(*overrides).trainer.optimizer
    return build_clip(config.clip, ["block"], config.max_grad_norm)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("clip.type=layerclip", "clip.alpha=1"), "set alpha above 1, for example 2"),
        (("clip.type=layerclip", "clip.beta=1"), "expected a decay between 0 and 1; set it to 0.99"),
        (("clip.type=layerclip", "clip.beta=0.0"), "expected a decay between 0 and 1; set it to 0.99"),
        (("clip.type=layerclip", "clip.warmup_steps=0"), "trainer.optimizer.clip.warmup_steps"),
        (("clip.type=layerclip", "clip.mode=paper_ema", "clip.beta=0.5"), "never clips"),
        (("clip.type=zclip", "clip.beta=1.5"), "expected a decay between 0 and 1; set it to 0.97"),
        (("clip.type=zclip", "clip.alpha=0"), "set alpha to 2.5"),
        (("clip.type=adagc", "clip.lam=1.0"), "set lam above 1"),
        (("clip.type=adagc", "clip.alpha=2"), "unknown key"),
        (("clip.alpha=2",), "set trainer.optimizer.clip.type"),
        (("clip.type=global", "clip.beta=0.5"), "unknown key"),
    ],
)
def test_a_clip_that_cannot_work_is_refused_with_the_cure(overrides: tuple[str, ...], said: str):
    with pytest.raises(UserError) as caught:
        parse(*overrides)
    assert said in str(caught.value)
    assert "trainer.optimizer.clip" in str(caught.value)


def test_without_a_clip_section_only_the_global_norm_is_clipped():
    assert isinstance(clip_of("max_grad_norm=0.5"), NoMemoryClip)


@pytest.mark.parametrize(
    ("overrides", "norms", "scales"),
    [
        (("type=layerclip", "alpha=4", "warmup_steps=2", "eps=0"), (1.0, 1.0, 8.0), (1.0, 1.0, 0.5)),
        (("type=layerclip", "mode=paper_ca", "alpha=1.5", "eps=0"), (1.0, 1.0, 7.0), (1.0, 1.0, 1.5 * 3 / 7)),
        (("type=layerclip", "mode=paper_ema", "alpha=2", "beta=0.75", "eps=0"), (1.0, 1.0, 9.0), (1.0, 1.0, 2 * 3 / 9)),
        (("type=zclip", "alpha=1", "beta=0.5", "warmup_steps=2", "eps=1e-12"), (1.0, 3.0, 12.0), (1.0, 1.0, 2.1 / 12)),
        (("type=adagc", "lam=2", "warmup_steps=1"), (0.5, 4.0), (1.0, 0.25)),
        (("type=adagc", "lam=2", "warmup_steps=1"), (4.0, 4.0), (1.0, 0.5)),
    ],
)
def test_every_key_of_a_clip_reaches_it(
    overrides: tuple[str, ...], norms: tuple[float, ...], scales: tuple[float, ...]
):
    clip = clip_of(*(f"clip.{override}" for override in overrides))
    assert [clip.decide([norm]).scales[0] for norm in norms] == [pytest.approx(scale) for scale in scales]


def test_the_default_layerclip_is_lagged_after_twenty_steps():
    clip = clip_of("clip.type=layerclip")
    assert isinstance(clip, LayerClip)
    scales = [clip.decide([norm]).scales[0] for norm in (*[1.0] * 19, 1.0, 10.0)]
    assert scales == [1.0] * 20 + [pytest.approx(0.2, rel=1e-6)]


def test_keys_of_muon_are_refused_without_it():
    with pytest.raises(
        UserError,
        match=(
            r'trainer.optimizer: got muon_momentum with type = "adamw", which has none; set trainer.optimizer.type ='
            r' "muon"'
        ),
    ):
        parse("muon_momentum=0.9")
    assert parse("type=muon", "muon_momentum=0.9").trainer.optimizer.muon_momentum == 0.9
