"""The audit of a dump: every row that is sound is scored, each token at the version that sampled it, and the gap is
measured, held against limits, explained.

    rows -> scores -> gap of each row and of all -> shifted columns -> attribution -> routing -> report

Owns that order. It must never know a file, a column or how a report looks.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.tokenization.tokenizer import load_tokenizer
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.inquiry import AttributionFacts
from trainer.consistency.attribution.scored import Scored, attribute_worst, gap_of, is_out_of_bounds
from trainer.consistency.checks.gap import check_gap, default_limits
from trainer.consistency.checks.mismatch import mismatch_metrics
from trainer.consistency.checks.routing import merge_agreements
from trainer.consistency.dump.cells import RowFinding
from trainer.consistency.dump.columns import SAMPLING, DumpSettings
from trainer.consistency.dump.reader import DumpReader, DumpRow, ModelShape, without_versions
from trainer.consistency.dump.report import AuditCounts, DumpReport
from trainer.consistency.dump.shift import check_shift
from trainer.consistency.dump.versions import PublishedVersions
from trainer.consistency.scoring.protocols import RoutingRescorer, ScoreOptions
from trainer.model.model_dir import ModelFacts, check_model_dir
from trainer.types.evidence import CheckFinding

MAX_VERSIONS = 4
"""Weight versions in memory besides version 0."""
BATCH_TOKENS = 16384
"""Rows x longest row of one forward pass, and tokens of one what-if question."""
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""


class DumpScorer(RoutingRescorer, Protocol):
    """A rescorer that says why it could not."""

    @property
    def unknown(self) -> dict[str, str]:
        """Key of each policy whose tokens are NaN in the last call -> reason."""
        ...


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
    ) -> None:
        """Audit with one model, or with `published` versions."""
        self._scorer, self._settings, self._limits, self._published = scorer, settings, limits, published
        self.reader = DumpReader(settings, model, published)

    def audit(self, rows: Sequence[DumpRow]) -> DumpReport:
        """The report on rows of `reader`, in their order."""
        sound = [row for row in rows if row.trajectory is not None]
        scored, unscored = self._score(sound)
        counted = [each for each in scored if each.mask.any()]
        gap, shifted = gap_of(scored), check_shift(*_columns(counted)) if counted else ()
        findings = (*check_gap(gap, self._limits, None), *self._one_model_for_several(rows))
        attribution, attributed = None, 0
        if is_out_of_bounds(gap, findings, self._limits, None) or any(each.fails(self._limits) for each in scored):
            findings = (*findings, *shifted)
            facts = AttributionFacts(structure=shifted)
            attribution, attributed = attribute_worst(counted, facts, self._scorer, self._limits, BATCH_TOKENS)
        routings = [each.routing for each in scored if each.routing is not None]
        return DumpReport(
            counts=_counts(rows, counted),
            limits=self._limits,
            metrics=mismatch_metrics(*_columns(counted)) if counted else None,
            row_findings=(
                *(finding for row in rows for finding in row.findings),
                *(
                    self._placed(row, finding)
                    for row, each, open_questions in zip(sound, scored, unscored, strict=True)
                    for finding in (*(each.check_gap(self._limits) if each.mask.any() else ()), *open_questions)
                ),
            ),
            findings=findings,
            attribution=attribution,
            attributed_rows=attributed,
            routing=merge_agreements(routings) if routings else None,
        )

    def _score(self, rows: Sequence[DumpRow]) -> tuple[list[Scored], list[tuple[CheckFinding, ...]]]:
        """Each row scored, and a finding where tokens of it could not be."""
        trajectories = [
            trajectory if self._published is not None else without_versions(trajectory)
            for row in rows
            if (trajectory := row.trajectory) is not None
        ]
        scores, routings = self._scorer.score_with_routing(trajectories, ScoreOptions())
        scored = [
            Scored(trajectory=trajectory, scores=np.where(np.isfinite(row), row, np.float32(np.nan)), routing=routing)
            for trajectory, row, routing in zip(trajectories, scores, routings, strict=True)
        ]
        return scored, [_unscored(each, self._scorer.unknown) for each in scored]

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
        return (CheckFinding.open_question("one_model_for_several_versions", f"{detail}; {cure}"),)

    def _placed(self, row: DumpRow, finding: CheckFinding) -> RowFinding:
        column = self._settings.columns.name("logprobs")
        return RowFinding(row=row.number, place=row.place, column=column, finding=finding)


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

    from trainer.consistency.scoring.held_versions import HeldVersions
    from trainer.consistency.scoring.scorer import Scorer
    from trainer.model.loading import DTYPES
    from trainer.model.policy_model import refuse_a_foreign_head

    facts: ModelFacts = check_model_dir(model_dir)
    bos_id = load_tokenizer(model_dir).bos_id
    published = None if weights_dir is None else PublishedVersions(weights_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scorer = Scorer(
        HeldVersions(model_dir, weights_dir or model_dir, dtype, CHUNK_TOKENS, MAX_VERSIONS, device), BATCH_TOKENS
    )
    refuse_a_foreign_head(scorer.model, DTYPES[dtype], device)
    return DumpAudit(
        scorer,
        settings,
        default_limits(settings.engine_dtype, "none", facts.is_moe, deterministic=False),
        ModelShape(
            vocab_size=facts.vocab_size, max_context=facts.max_context, bos_id=bos_id, routing=scorer.routing_cell
        ),
        published=published,
    )


def _unscored(scored: Scored, unknown: Mapping[str, str]) -> tuple[CheckFinding, ...]:
    """The tokens without a score, and why: `unknown`, key of a policy -> reason."""
    trajectory = scored.trajectory
    missing = np.flatnonzero(trajectory.sampled & ~scored.mask)
    if not missing.size:
        return ()
    mine = {span.policy.key for span in trajectory.version_spans}
    why = "; ".join(reason for key, reason in unknown.items() if key in mine) or "the model gives no finite number"
    detail = f"{missing.size} of {trajectory.num_sampled} sampled tokens have no score ({why}); expected one each"
    return (CheckFinding.open_question("tokens_not_scored", detail, tuple(missing.tolist())),)


def _columns(
    scored: Sequence[Scored],
) -> tuple[list[NDArray[np.float32]], list[NDArray[np.float32]], list[NDArray[np.bool_]]]:
    """Scores, log and mask of each row."""
    return [s.scores for s in scored], [s.trajectory.rollout_logprobs for s in scored], [s.mask for s in scored]


def _counts(rows: Sequence[DumpRow], scored: Sequence[Scored]) -> AuditCounts:
    return AuditCounts(
        rows=len(rows),
        rows_scored=len(scored),
        rows_with_versions=sum(row.has_versions for row in rows),
        rows_with_routing=sum(row.trajectory is not None and row.trajectory.routing is not None for row in rows),
        rows_assumed={key: sum(key in row.assumed for row in rows) for key in SAMPLING},
        tokens=sum(row.num_tokens for row in rows),
        sampled_tokens=sum(row.num_sampled for row in rows),
        scored_tokens=sum(int(s.mask.sum()) for s in scored),
    )
