"""Distributions that nobody declared: their values are estimated from the log-probs."""

from typing import Any

import pytest
from support.consistency.attribution_room import AS_LOGGED, LIMITS, DistributionRescorer, sampled_as

from rollout.types.trajectory import Trajectory
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.attribution.semantics import SEARCH_TOKENS, usual_sampling
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.types.evidence import Attribution, GapCause

EXACT = LIMITS.model_copy(update={"mean_abs_warn": 1e-5, "mean_abs_fail": 1e-3})


def found_in(rescorer: DistributionRescorer, trajectories: list[Trajectory], **facts: Any) -> Attribution:
    found = attribute(trajectories, AttributionFacts(**facts), rescorer, EXACT)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("truth", "tag", "reading"),
    [
        ({"temperature": 0.7}, {}, "temperature 0.7, where 1 is declared"),
        ({"temperature": 1.85}, {}, "temperature 1.85, where 1 is declared"),
        ({"temperature": 0.35}, {}, "temperature 0.35, where 1 is declared"),
        ({"temperature": 0.93}, {"temperature": 0.6}, "temperature 0.93, where 0.6 is declared"),
        ({"temperature": 0.5, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9}, "temperature 0.5, where 0.8"),
        ({"top_p": 0.73}, {}, "truncated to top_p 0.73, which is not declared"),
        ({"top_p": 0.37}, {"top_p": 0.9}, "truncated to top_p 0.37, which is not declared"),
        ({"top_p": 0.6, "top_k": 0}, {"top_k": 20}, "truncated to top_p 0.6, which is not declared"),
        ({"top_k": 2}, {}, "truncated to top_k 2, which is not declared"),
        ({"top_k": 13}, {}, "truncated to top_k 13, which is not declared"),
        ({"top_k": 6}, {"top_k": 20, "temperature": 0.7}, "truncated to top_k 6, which is not declared"),
        ({"token": "likeliest"}, {}, "log-probs of the likeliest token, not of the sampled one"),
    ],
)
def test_what_was_sampled_from_is_estimated_and_named_with_its_value(
    truth: dict[str, Any], tag: dict[str, Any], reading: str
):
    rescorer = DistributionRescorer()
    found = found_in(rescorer, sampled_as(rescorer, ScoreOptions(**truth), **tag))
    assert found.first is GapCause.LOGPROB_SEMANTICS and found.explained > 0.999
    assert found.readings[0].startswith(reading)


def test_another_model_has_no_temperature_and_no_truncation():
    rescorer = DistributionRescorer()
    found = found_in(rescorer, sampled_as(DistributionRescorer(seed=1), AS_LOGGED))
    assert found.parts == () and found.first is GapCause.UNKNOWN


def test_a_search_asks_about_a_part_and_confirms_on_the_whole():
    rescorer = DistributionRescorer()
    many = sampled_as(rescorer, ScoreOptions(top_k=13), count=150)
    assert found_in(rescorer, many).first is GapCause.LOGPROB_SEMANTICS
    whole = sum(t.token_ids.size for t in many)
    assert rescorer.tokens.count(whole) <= 5 and max(n for n in rescorer.tokens if n != whole) <= SEARCH_TOKENS


def test_a_canary_that_failed_leaves_only_what_is_declared_to_ask_about():
    rescorer = DistributionRescorer()
    found = found_in(
        rescorer, sampled_as(rescorer, ScoreOptions(temperature=0.7)), canary_gap=1.0, canary_tolerance=0.1
    )
    assert found.first is GapCause.WEIGHT_SYNC and {options.temperature for options in rescorer.asked} == {None}


@pytest.mark.parametrize(
    ("recommended", "settings"),
    [
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, [(0.7, 0.8, 20)]),
        ({"temperature": 0.6, "top_p": 0.95}, [(0.6, 0.95, 0), (0.6, 0.95, 50)]),
        ({}, []),
        ({"top_k": 50}, []),
        ({"temperature": 0.0}, []),
    ],
)
def test_the_sampling_that_a_model_recommends_is_asked_about(
    recommended: dict[str, float], settings: list[tuple[float, float, int]]
):
    usual = usual_sampling(recommended)
    assert [(each.temperature, each.top_p, each.top_k) for each in usual] == settings
    if settings:
        rescorer, (temperature, top_p, top_k) = DistributionRescorer(), settings[0]
        truth = ScoreOptions(temperature=temperature, top_p=top_p, top_k=top_k)
        found = found_in(rescorer, sampled_as(rescorer, truth), usual=usual)
        assert found.explained > 0.999 and "generation_config.json recommends" in found.readings[0]
