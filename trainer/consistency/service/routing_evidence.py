"""From agreements of routing to findings and to the numbers of a replica. It owns what missing evidence is called and
must never know a router. Numpy only."""

from collections.abc import Sequence
from dataclasses import replace

from rollout.types.trajectory import Trajectory
from trainer.consistency.checks.routing import NOTHING_COMPARED, RoutingAgreement, merge_agreements
from trainer.types.evidence import Check, CheckFinding


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


def routing_facts(agreements: Sequence[RoutingAgreement | None], missing: int) -> RoutingAgreement | None:
    """One replica's numbers over its trajectories; None where there is nothing to say: no trace came, and none was
    expected.

    Args:
        agreements: one a trajectory, None where nothing was compared.
        missing: sampled tokens of trajectories without the trace that was expected: they lower the coverage.
    """
    found = [agreement for agreement in agreements if agreement is not None]
    if not found and not missing:
        return None
    whole = merge_agreements(found) if found else NOTHING_COMPARED
    return replace(whole, num_predicting=whole.num_predicting + missing)


def _incomplete(code: str, detail: str) -> CheckFinding:
    return CheckFinding.open_question(code, detail, check=Check.ROUTING)
