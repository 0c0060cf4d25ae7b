"""Evidence survives the store byte for byte, and damage is reported."""

import numpy as np
import pytest
from support.builders import build_evidence, build_group

from rollout.errors import ConcordError
from trainer.types.evidence import (
    Attribution,
    Check,
    CheckFinding,
    CheckSeverity,
    GapCause,
    decode_evidence,
    encode_evidence,
)
from trainer.types.step import Verdict


def test_evidence_comes_back_as_it_was_stored():
    evidence = build_evidence(
        build_group(rewards=(1.0, 0.0, 1.0), prompt_tokens=5),
        (Verdict.ACCEPT, Verdict.MASK, Verdict.QUARANTINE),
        shift=0.125,
    )
    finding = CheckFinding(
        check=Check.PRECISION, severity=CheckSeverity.FAIL, code="gap_mean", detail="too far", positions=(3, 7)
    )
    attribution = Attribution(gap=0.5, parts=((GapCause.PRECISION, 0.4),), residual=0.1)
    for name, value in (("findings", (finding,)), ("attribution", attribution), ("suspects", (9,))):
        object.__setattr__(evidence.trajectories[1], name, value)
    back = decode_evidence(encode_evidence(evidence))
    assert (back.dispatch_id, back.replica, back.policies) == (
        evidence.dispatch_id,
        evidence.replica,
        evidence.policies,
    )
    for got, wanted in zip(back.trajectories, evidence.trajectories, strict=True):
        for name in ("scored", "behaviour_logprobs", "masked"):
            np.testing.assert_array_equal(getattr(got, name), getattr(wanted, name))
        for name in ("trajectory_id", "verdict", "findings", "attribution", "suspects"):
            assert getattr(got, name) == getattr(wanted, name)
    assert back.trajectories[1].reasons == ("gap_mean",)


@pytest.mark.parametrize("damage", [b"CEV2", b""])
def test_foreign_bytes_are_refused(damage: bytes):
    with pytest.raises(ConcordError, match="another version"):
        decode_evidence(damage + encode_evidence(build_evidence(build_group()))[4:])


def test_cut_evidence_is_damaged():
    with pytest.raises(ConcordError, match="damaged"):
        decode_evidence(encode_evidence(build_evidence(build_group()))[:-9])


def test_the_first_cause_is_the_largest_part_unless_the_residual_is_larger():
    parts = ((GapCause.ROUTING, 0.1), (GapCause.PRECISION, 0.3))
    assert Attribution(gap=0.5, parts=parts, residual=0.1).first is GapCause.PRECISION
    assert Attribution(gap=1.0, parts=parts, residual=0.6).first is GapCause.UNKNOWN
    assert Attribution(gap=0.5, parts=parts, residual=0.1).explained == pytest.approx(0.8)
