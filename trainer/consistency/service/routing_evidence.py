"""From agreements of routing to findings and to the numbers of a replica. It owns what missing evidence is called and
must never know a router. Numpy only."""

from collections.abc import Sequence

from rollout.types.trajectory import Trajectory
from trainer.consistency.checks.routing import RoutingAgreement, merge_agreements
from trainer.consistency.service.report import RoutingFacts
from trainer.types.evidence import Check, CheckFinding, CheckSeverity


def check_routing(
    trajectory: Trajectory, agreement: RoutingAgreement | None, *, expected: bool
) -> tuple[CheckFinding, ...]:
    """Whether the evidence of one trajectory of a mixture of experts is whole. How far the experts agree is no finding
    of its own: the gap in nats is.

    Args:
        agreement: of its scored tokens; None where nothing was compared.
        expected: the engine is asked to return its routing.
    """
    if trajectory.routing is None:
        return (
            (
                _incomplete(
                    "routing_missing",
                    "got no routing; expected one row of experts an input: the engine is asked for it",
                ),
            )
            if expected
            else ()
        )
    if agreement is None or agreement.coverage == 1.0:
        return ()
    compared, wanted, hollow = (
        agreement.num_predicting_compared,
        agreement.num_predicting,
        int(agreement.hollow_cells.sum()),
    )
    padded = f", and {hollow} cells that name an expert twice or none at all" if hollow else ""
    return (
        _incomplete(
            "routing_incomplete",
            f"got experts for {compared} of the {wanted} inputs that predict a sampled token{padded}; expected all",
        ),
    )


def routing_facts(agreements: Sequence[RoutingAgreement | None], missing: int) -> RoutingFacts | None:
    """One replica's numbers over its trajectories; None where there is nothing to tell: no trace came, and none was
    expected.

    Args:
        agreements: one a trajectory, None where nothing was compared.
        missing: sampled tokens of trajectories without the trace that was expected: they lower the coverage.
    """
    found = [agreement for agreement in agreements if agreement is not None]
    if not found:
        return _nothing_compared() if missing else None
    whole = merge_agreements(found)
    wanted = whole.num_predicting + missing
    return RoutingFacts(
        num_rows=whole.num_rows,
        coverage=whole.num_predicting_compared / wanted if wanted else 1.0,
        mismatch=whole.mismatch,
        token_any_mismatch=whole.token_any_mismatch,
        gate_gap_mismatch=whole.gate_gap_mismatch,
        jaccard=whole.jaccard,
        block_mismatch=tuple(float(value) for value in whole.block_mismatch),
        hollow_cells=int(whole.hollow_cells.sum()),
    )


def _nothing_compared() -> RoutingFacts:
    nan = float("nan")
    return RoutingFacts(
        num_rows=0,
        coverage=0.0,
        mismatch=nan,
        token_any_mismatch=nan,
        gate_gap_mismatch=None,
        jaccard=nan,
        block_mismatch=(),
        hollow_cells=0,
    )


def _incomplete(code: str, detail: str) -> CheckFinding:
    return CheckFinding(check=Check.ROUTING, severity=CheckSeverity.INCOMPLETE, code=code, detail=detail)
