"""What the consistency service found about a group, in words for `concord explain`."""

from orchestrator.commands.tables import say
from rollout.store.sqlite.reader import StoreReader
from trainer.types.evidence import ANNOTATION_KIND, Attribution, GroupEvidence, TrajectoryEvidence, decode_evidence

_KINDS = (ANNOTATION_KIND, "evidence")


def evidence_of(reader: StoreReader, dispatch_id: str) -> GroupEvidence | None:
    """The newest evidence of a group; None where it was not scored."""
    payloads = [annotation.payload for annotation in reader.annotations(dispatch_id) if annotation.kind in _KINDS]
    return decode_evidence(payloads[-1]) if payloads else None


def show_evidence(evidence: TrajectoryEvidence) -> None:
    """Verdict, findings and attribution of one trajectory."""
    scored, reasons = int(evidence.scored.sum()), ", ".join(evidence.reasons)
    say(
        f"  consistency: verdict {evidence.verdict}{f' ({reasons})' if reasons else ''}; {scored} tokens scored at the "
        "version that sampled them"
    )
    for finding in evidence.findings:
        say(f"    {finding.severity} {finding.check} {finding.code}: {finding.detail}")
    if evidence.attribution is not None:
        say(f"    {attribution_text(evidence.attribution)}")
    if evidence.suspects:
        say(f"    suspect positions, largest |d| first: {', '.join(map(str, evidence.suspects))}")


def attribution_text(attribution: Attribution) -> str:
    """One line: the gap, its parts in nats, and the residual."""
    parts = ", ".join(
        f"{cause} {nats:.3g}{f' ({reading})' if reading else ''}" for cause, nats, reading in attribution.read_parts
    )
    return (
        f"gap of its replica {attribution.gap:.3g} nats a token, explained by {parts or 'nothing'}; residual "
        f"{attribution.residual:.3g}"
    )
