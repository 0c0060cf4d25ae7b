"""The audit of a dump: every row that is sound is scored, each token at the version that sampled it, and the gap is
measured, held against limits, explained.

    rows -> scores -> gap of each row and of all -> shifted columns -> attribution -> routing -> report

Owns that order. It must never know a file, a column or how a report looks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.tokenization.tokenizer import load_tokenizer
from rollout.types.trajectory import Trajectory
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.attribution import attribute
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.checks.gap import GapSummary, check_gap, default_limits, gap_floor, gap_summary
from trainer.consistency.checks.mismatch import mismatch_metrics
from trainer.consistency.checks.routing import RoutingAgreement
from trainer.consistency.dump.cells import RowFinding
from trainer.consistency.dump.columns import SAMPLING_KEYS, DumpSettings
from trainer.consistency.dump.reader import DumpReader, DumpRow, ModelShape, without_versions
from trainer.consistency.dump.report import AuditCounts, DumpReport
from trainer.consistency.dump.shift import check_shift
from trainer.consistency.dump.versions import PublishedVersions
from trainer.consistency.scoring.protocols import Rescorer, ScoreOptions
from trainer.model.model_dir import ModelFacts, check_model_dir
from trainer.types.evidence import Attribution, Check, CheckFinding, CheckSeverity

MAX_VERSIONS = 4
"""Weight versions in memory besides version 0."""
BATCH_TOKENS = 16384
"""Rows x longest row of one forward pass, and tokens of one what-if question."""
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""


class DumpScorer(Rescorer, Protocol):
    """A rescorer that says why it could not."""

    @property
    def unknown(self) -> dict[str, str]:
        """Of the last call: key of each policy whose tokens are NaN -> reason."""
        ...


class Routings(Protocol):
    """Compares routing."""

    def compare(
        self, trajectories: Sequence[Trajectory], scores: Sequence[NDArray[np.float32]]
    ) -> RoutingAgreement | None:
        """As `dump_routing.RoutingComparison.compare`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Scored:
    """One sound row with its scores."""

    row: DumpRow
    trajectory: Trajectory
    scores: NDArray[np.float32]
    """[T] nats, NaN where it could not be scored."""
    mask: NDArray[np.bool_]
    """[T] sampled and scored."""
    summary: GapSummary
    findings: tuple[CheckFinding, ...]
    """About its gap."""

    @property
    def fails(self) -> bool:
        """Whether its own gap is out of bounds."""
        return any(finding.severity is CheckSeverity.FAIL for finding in self.findings)


class DumpAudit:
    """Audits rows with one model, or with the published versions of one run."""

    def __init__(
        self,
        scorer: DumpScorer,
        settings: DumpSettings,
        limits: GapLimits,
        model: ModelShape,
        *,
        published: PublishedVersions | None = None,
        routings: Routings | None = None,
    ) -> None:
        """Audit with one model, or with `published` versions; `routings` compares the experts of a mixture of
        experts."""
        self._scorer, self._settings, self._limits = scorer, settings, limits
        self._published, self._routings = published, routings
        self.reader = DumpReader(settings, model, published)

    def audit(self, rows: Sequence[DumpRow]) -> DumpReport:
        """The report on rows of `reader`, in their order."""
        scored = self._score(rows)
        summary = _summary(scored)
        shifted = check_shift(*_columns(scored)) if summary.num_tokens else ()
        findings = (*check_gap(summary, self._limits, None), *self._one_model_for_several(rows))
        out_of_bounds = summary.num_tokens > 0 and (
            summary.mean_abs > gap_floor(self._limits, None)
            or any(s.fails for s in scored)
            or any(f.code == "gap_tail" for f in findings)
        )
        if out_of_bounds:
            findings = (*findings, *shifted)
        attribution, attributed = self._attribute(scored, shifted) if out_of_bounds else (None, 0)
        counted = [s for s in scored if s.mask.any()]
        return DumpReport(
            counts=_counts(rows, counted),
            limits=self._limits,
            metrics=mismatch_metrics(*_columns(counted)) if counted else None,
            row_findings=tuple(each for row in rows for each in row.findings)
            + tuple(self._placed(s, finding) for s in scored for finding in s.findings),
            findings=findings,
            attribution=attribution,
            attributed_rows=attributed,
            routing=(
                None
                if self._routings is None or not scored
                else self._routings.compare([s.trajectory for s in scored], [s.scores for s in scored])
            ),
        )

    def _score(self, rows: Sequence[DumpRow]) -> list[_Scored]:
        sound = [(row, row.trajectory) for row in rows if row.trajectory is not None]
        trajectories = [
            trajectory if self._published is not None else without_versions(trajectory) for _, trajectory in sound
        ]
        scores = self._scorer.score(trajectories, ScoreOptions())
        unknown = self._scorer.unknown
        return [
            self._judged(row, *pair, unknown)
            for (row, _), pair in zip(sound, zip(trajectories, scores, strict=True), strict=True)
        ]

    def _judged(
        self, row: DumpRow, trajectory: Trajectory, scores: NDArray[np.float32], unknown: dict[str, str]
    ) -> _Scored:
        mask = trajectory.sampled & np.isfinite(scores)
        summary = gap_summary([scores], [trajectory.rollout_logprobs], [mask])
        findings = check_gap(summary, self._limits, None) if summary.num_tokens else ()
        missing = tuple(int(position) for position in np.flatnonzero(trajectory.sampled & ~mask))
        if missing:
            mine = {span.policy.key for span in trajectory.version_spans}
            why = (
                "; ".join(reason for key, reason in unknown.items() if key in mine)
                or "the model gives no finite number"
            )
            detail = (
                f"{len(missing)} of {trajectory.num_sampled} sampled tokens have no score ({why}); expected one each"
            )
            findings = (
                *findings,
                CheckFinding(
                    check=Check.EVIDENCE,
                    severity=CheckSeverity.INCOMPLETE,
                    code="tokens_not_scored",
                    detail=detail,
                    positions=missing,
                ),
            )
        return _Scored(row=row, trajectory=trajectory, scores=scores, mask=mask, summary=summary, findings=findings)

    def _attribute(
        self, scored: Sequence[_Scored], shifted: tuple[CheckFinding, ...]
    ) -> tuple[Attribution | None, int]:
        """Of the rows that fail by themselves, or of all where only the sum does: a fault that touches a few must not
        drown in the rest."""
        some = [s for s in scored if s.mask.any()]
        asked = [s for s in some if s.fails] or some
        behaviour = [np.where(np.isfinite(s.scores), s.scores, np.float32(np.nan)) for s in asked]
        facts = AttributionFacts(structure=shifted)
        return attribute(
            [s.trajectory for s in asked],
            facts,
            self._scorer,
            self._limits,
            max_tokens=BATCH_TOKENS,
            behaviour=behaviour,
        ), len(asked)

    def _one_model_for_several(self, rows: Sequence[DumpRow]) -> tuple[CheckFinding, ...]:
        """Without published weights, a dump of several versions was measured against one model: then the gap holds
        staleness too."""
        if self._published is not None:
            return ()
        policies = {
            span.policy.key
            for row in rows
            if row.trajectory is not None and row.has_versions
            for span in row.trajectory.version_spans
        }
        if len(policies) < 2:
            return ()
        detail = (
            f"got {len(policies)} versions ({', '.join(sorted(policies)[:4])}, ...), all scored with one model, so that"
            " the gap holds staleness too"
        )
        cure = "give the published weights with --weights"
        return (
            CheckFinding(
                check=Check.EVIDENCE,
                severity=CheckSeverity.INCOMPLETE,
                code="one_model_for_several_versions",
                detail=f"{detail}; {cure}",
            ),
        )

    def _placed(self, scored: _Scored, finding: CheckFinding) -> RowFinding:
        return RowFinding(
            row=scored.row.number,
            place=scored.row.place,
            column=self._settings.columns.name("logprobs"),
            finding=finding,
        )


def open_audit(model_dir: Path, weights_dir: Path | None, settings: DumpSettings, dtype: str) -> DumpAudit:
    """Load the model of an audit, on a GPU where there is one.

    Args:
        weights_dir: the `weights` folder of a run; None scores every token with `model_dir`.
        dtype: what scores are computed in, `float32` or `bfloat16`.

    Raises:
        UserError: a directory is not what it should be, or the model does more to its logits than the scorer can
            follow.
    """
    import torch

    from trainer.consistency.dump.routing import RoutingComparison, routing_cell
    from trainer.consistency.scoring.scorer import Scorer
    from trainer.model.loading import DTYPES
    from trainer.model.policy_model import refuse_a_foreign_head

    facts: ModelFacts = check_model_dir(model_dir)
    bos_id = load_tokenizer(model_dir).bos_id
    published = None if weights_dir is None else PublishedVersions(weights_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = Scorer(
        model_dir=model_dir,
        weights_dir=weights_dir or model_dir,
        dtype=dtype,
        chunk_tokens=CHUNK_TOKENS,
        batch_tokens=BATCH_TOKENS,
        max_versions=MAX_VERSIONS,
        device=device,
    )
    refuse_a_foreign_head(scorer.model, DTYPES[dtype], device)
    cell = routing_cell(scorer.model)
    return DumpAudit(
        scorer,
        settings,
        default_limits(settings.engine_dtype, "none", facts.is_moe, deterministic=False),
        ModelShape(vocab_size=facts.vocab_size, max_context=facts.max_context, bos_id=bos_id, routing=cell),
        published=published,
        routings=None if cell is None else RoutingComparison(scorer, scorer.model),
    )


def _summary(scored: Sequence[_Scored]) -> GapSummary:
    return gap_summary(*_columns(scored))


def _columns(
    scored: Sequence[_Scored],
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]], list[NDArray[np.bool_]]]:
    """Scores, log and mask of each row."""
    return [s.scores for s in scored], [s.trajectory.rollout_logprobs for s in scored], [s.mask for s in scored]


def _counts(rows: Sequence[DumpRow], scored: Sequence[_Scored]) -> AuditCounts:
    return AuditCounts(
        rows=len(rows),
        rows_scored=len(scored),
        rows_with_versions=sum(row.has_versions for row in rows),
        rows_with_routing=sum(row.trajectory is not None and row.trajectory.routing is not None for row in rows),
        rows_assumed={key: sum(key in row.assumed for row in rows) for key in SAMPLING_KEYS},
        tokens=sum(row.num_tokens for row in rows),
        sampled_tokens=sum(row.num_sampled for row in rows),
        scored_tokens=sum(int(s.mask.sum()) for s in scored),
    )
