"""The audit of a dump: every row that is sound is scored, each token at the version that sampled it, and the gap is
measured, held against limits, explained.

    rows -> scores -> gap of each row and of all -> shifted columns -> attribution -> routing -> report

Owns that order. It must never know a file, a column or how a report looks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rollout.tokenization.files import read_tokenizer_files
from rollout.tokenization.tokenizer import load_tokenizer
from trainer.config.consistency import GapLimits
from trainer.consistency.attribution.engine_inputs import padded_widths
from trainer.consistency.attribution.inquiry import AttributionFacts, InputFacts
from trainer.consistency.attribution.scored import Scored, attribute_worst, gap_of, is_out_of_bounds
from trainer.consistency.attribution.semantics import usual_sampling
from trainer.consistency.checks.gap import check_gap, default_limits
from trainer.consistency.checks.mismatch import mismatch_metrics
from trainer.consistency.checks.routing import merge_agreements
from trainer.consistency.checks.tokens import num_given
from trainer.consistency.dump.cells import RowFinding
from trainer.consistency.dump.columns import SAMPLING, DumpSettings
from trainer.consistency.dump.reader import DumpReader, DumpRow, ModelShape, without_versions
from trainer.consistency.dump.report import AuditCounts, DumpReport
from trainer.consistency.dump.shift import LoggedRow, check_places
from trainer.consistency.dump.versions import PublishedVersions
from trainer.consistency.scoring.protocols import RoutingRescorer, ScoreOptions
from trainer.model.model_dir import ModelFacts, check_model_dir
from trainer.types.evidence import Attribution, Check, CheckFinding, GapCause

MAX_VERSIONS = 4
"""Weight versions in memory besides version 0."""
BATCH_TOKENS = 16384
"""Rows x longest row of one forward pass, and tokens of one what-if question."""
CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""
SOME_ROWS = 0.2
"""Failing rows up to this share of all are named as such: the fault is theirs, not the dump's."""
_NAMED_ROWS = 16


class DumpScorer(RoutingRescorer, Protocol):
    """A rescorer that says why it could not, and how much it has done."""

    @property
    def scored_tokens(self) -> int:
        """Tokens that it was asked for so far."""
        ...

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
        self._model = model
        self.reader = DumpReader(settings, model, published)

    @property
    def scored_tokens(self) -> int:
        """Tokens that were scored so far, those of what-if questions included."""
        return self._scorer.scored_tokens

    def audit(self, rows: Sequence[DumpRow]) -> DumpReport:
        """The report on rows of `reader`, in their order."""
        sound = [row for row in rows if row.trajectory is not None]
        scored, unscored = self._score(sound)
        counted = [each for each in scored if each.mask.any()]
        gap = gap_of(scored)
        findings = (*check_gap(gap, self._limits, None), *self._one_model_for_several(rows))
        attribution, attributed, placed = None, 0, dict[int, CheckFinding]()
        failing = [number for number, each in enumerate(scored) if each.mask.any() and each.fails(self._limits)]
        if is_out_of_bounds(gap, findings, self._limits, None) or failing:
            logged = {number: _logged(sound[number], each) for number, each in enumerate(scored) if each.mask.any()}
            placed = check_places(
                [logged[number] for number in failing] or list(logged.values()), list(logged.values())
            )
            facts = replace(self._facts(counted), structure=tuple(placed.values())[:1])
            attribution, attributed = attribute_worst(counted, facts, self._scorer, self._limits, BATCH_TOKENS)
            findings = (*findings, *_some_rows(attribution, [sound[number].number for number in failing], len(counted)))
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
                    for finding in (
                        *(each.check_gap(self._limits) if each.mask.any() else ()),
                        *open_questions,
                        *((placed[row.number],) if row.number in placed else ()),
                    )
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

    def _facts(self, scored: Sequence[Scored]) -> AttributionFacts:
        """What is known beside the log-probs: an engine of another framework may have read other prompts."""
        prompts = [num_given(each.trajectory) for each in scored]
        inputs = InputFacts(
            pad_ids=self._model.pad_ids,
            bos_id=self._model.bos_id,
            max_context=self._model.max_context,
            widths=padded_widths(prompts),
        )
        return AttributionFacts(inputs=inputs, usual=self._model.usual)

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
    tokenizer = load_tokenizer(model_dir)
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
            vocab_size=facts.vocab_size,
            max_context=facts.max_context,
            bos_id=tokenizer.bos_id,
            routing=scorer.routing_cell,
            pad_ids=tokenizer.pad_ids,
            usual=usual_sampling(read_tokenizer_files(model_dir).sampling),
        ),
        published=published,
    )


def _logged(row: DumpRow, scored: Scored) -> LoggedRow:
    return LoggedRow(
        number=row.number, scores=scored.scores, logged=scored.trajectory.rollout_logprobs, mask=scored.mask
    )


def _some_rows(attribution: Attribution | None, failing: Sequence[int], scored: int) -> tuple[CheckFinding, ...]:
    """A finding where the gap that nothing explains is one of a few rows: what is wrong is wrong with them."""
    few = 0 < len(failing) <= SOME_ROWS * scored
    if attribution is None or attribution.first is not GapCause.UNKNOWN or not few:
        return ()
    named = ", ".join(map(str, failing[:_NAMED_ROWS])) + (", ..." if len(failing) > _NAMED_ROWS else "")
    detail = (
        f"got {len(failing)} of {scored} rows with a gap that no cause explains (rows {named}); the others agree with "
        "the model. Look at how these rows came about: another model, other ids, or log-probs of something else"
    )
    return (CheckFinding.failure(Check.EVIDENCE, "gap_in_some_rows", detail),)


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
