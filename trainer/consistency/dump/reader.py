"""From one row of any framework's dump to a trajectory that can be scored, and to the findings where it is none.

    row -> cells -> laid along the tokens by the layout -> structure, versions, routing against the model -> DumpRow

It owns that order, and which column a finding is about. It must never know a file, weights or what a gap means. A row
with a finding that failed about its structure is counted and not scored; it is never repaired. Torch-free.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollout.types.trajectory import EngineTag, FinishReason, LogprobSemantics, Timings, Trajectory, VersionSpan
from trainer.consistency.attribution.inquiry import UsualSampling
from trainer.consistency.checks.structure import Nats, check_structure
from trainer.consistency.checks.tokens import sampled_runs
from trainer.consistency.checks.versions import check_versions
from trainer.consistency.dump.alignment import AlignedRow, align
from trainer.consistency.dump.cells import Cells, RowFinding
from trainer.consistency.dump.columns import NOT_TRUNCATED, SAMPLING, ColumnKey, DumpLayout, DumpSettings, SamplingKey
from trainer.consistency.dump.values import NAME
from trainer.consistency.dump.versions import BASE, PublishedVersions, policy_named
from trainer.types.evidence import CheckFinding

_COLUMN_OF: Mapping[str, ColumnKey] = {
    "id_outside_vocabulary": "ids",
    "doubled_bos": "ids",
    "longer_than_context": "ids",
    "nothing_sampled": "mask",
    "first_token_sampled": "mask",
    "spans_broken": "version",
    "sampled_without_version": "version",
    "version_without_mask": "version",
}
"""Code of a structural finding -> what it is about; all others are about log-probs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a row must fit."""

    vocab_size: int
    """Rows of the embedding."""
    max_context: int | None
    bos_id: int | None
    routing: tuple[int, int] | None
    """(blocks with experts, experts a token); None for a dense model."""
    pad_ids: tuple[int, ...] = ()
    """Ids that prompts of this model may be padded with."""
    usual: tuple[UsualSampling, ...] = ()
    """How the model's files say that it is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DumpRow:
    """One row, checked as far as that goes without weights."""

    number: int
    """From 0."""
    place: str
    assumed: tuple[SamplingKey, ...]
    """What neither the row nor the command line says of its sampling."""
    findings: tuple[RowFinding, ...]
    num_tokens: int = 0
    """0 where its ids could not be read."""
    num_sampled: int = 0
    trajectory: Trajectory | None = None
    """Its spans are those of the dump, and all of version 0 where the dump has none. None: not sound, or without
    log-probs."""
    has_versions: bool = False


class DumpReader:
    """Reads the rows of one dump."""

    def __init__(self, settings: DumpSettings, model: ModelShape, published: PublishedVersions | None) -> None:
        """Read rows that shall fit `model`; `published` are the versions that there can be, None takes the dump's
        word."""
        self._settings, self._model, self._published = settings, model, published

    def read(self, number: int, place: str, row: Mapping[str, object]) -> DumpRow:
        """One row. Whatever is wrong with it is among its findings; nothing is raised."""
        cells = Cells(number, place, row, self._settings)
        name = str(cells.read("id", NAME) or number)
        sampling, assumed = self._sampling(cells)
        aligned = align(cells, self._settings.layout)
        if aligned is None:
            return DumpRow(number=number, place=place, assumed=assumed, findings=tuple(cells.findings))
        self._check_structure(cells, aligned)
        spans = self._spans(cells, aligned)
        self._check_routing(cells, aligned)
        trajectory = None
        if not cells.failed and aligned.logprobs is not None and not any(_has_no_log(each) for each in cells.findings):
            trajectory = self._trajectory(name, aligned, aligned.logprobs, spans, sampling)
            if aligned.spans is not None:
                self._check_versions(cells, trajectory)
        return DumpRow(
            number=number,
            place=place,
            assumed=assumed,
            findings=tuple(cells.findings),
            num_tokens=aligned.token_ids.size,
            num_sampled=int(aligned.sampled.sum()),
            trajectory=trajectory,
            has_versions=aligned.spans is not None,
        )

    def _sampling(self, cells: Cells) -> tuple[dict[SamplingKey, float], tuple[SamplingKey, ...]]:
        """What the command line says, else the row, else nothing but temperature 1 without truncation, which is noted
        as assumed."""
        found: dict[SamplingKey, float] = {}
        assumed: list[SamplingKey] = []
        for key, kind in SAMPLING.items():
            said = self._settings.sampling.get(key)
            if said is None:
                said = cells.read(key, kind)
            if said is None and not cells.has(key):
                assumed.append(key)
            found[key] = NOT_TRUNCATED[key] if said is None else said
        return found, tuple(assumed)

    def _check_structure(self, cells: Cells, aligned: AlignedRow) -> None:
        for finding in check_structure(aligned, self._model.vocab_size, self._model.bos_id):
            # What is missing was noted when the cells were read, with the columns that there are.
            if finding.code not in ("logprobs_missing", "spans_missing"):
                cells.note(self._key_of(finding.code, finding.positions, aligned), finding)
        limit, got = self._model.max_context, aligned.token_ids.size
        if limit is not None and got > limit:
            detail = f"got {got} tokens in all; the model has a context of {limit}: expected the model that sampled"
            cells.fail(self._key_of("longer_than_context", (got,), aligned), "longer_than_context", detail)

    def _key_of(self, code: str, positions: tuple[int, ...], aligned: AlignedRow) -> ColumnKey:
        key = _COLUMN_OF.get(code, "logprobs")
        if self._settings.layout is not DumpLayout.COMPLETION or key != "ids":
            return key
        return "prompt_ids" if positions and positions[0] < aligned.num_prompt else "completion_ids"

    def _spans(self, cells: Cells, aligned: AlignedRow) -> tuple[VersionSpan, ...]:
        if aligned.spans is None:
            return _of_base(aligned.sampled)
        policy = policy_named if self._published is None else self._published.policy
        spans: list[VersionSpan] = []
        for (start, end), version in zip(aligned.spans, aligned.versions, strict=True):
            try:
                spans.append(VersionSpan(policy(version), start, end))
            except ValueError as error:
                cells.fail("version", "unfit_value", str(error), tuple(range(start, end)))
        return tuple(spans)

    def _check_versions(self, cells: Cells, trajectory: Trajectory) -> None:
        own = {span.policy for span in trajectory.version_spans}
        base = {policy for policy in own if policy.version == 0}
        known = own if self._published is None else self._published.policies | base
        for finding in check_versions(trajectory, known=known, committed=max(known)):
            cells.note("version", finding)

    def _check_routing(self, cells: Cells, aligned: AlignedRow) -> None:
        cell, trace = self._model.routing, aligned.routing
        if trace is None:
            if cell is not None or cells.is_named("routing"):
                cells.absent("routing")
        elif cell is None:
            detail = "got experts, and the model has none; expected the model that sampled"
            cells.fail("routing", "routing_of_dense_model", detail)
        elif trace.experts.shape[1:] != cell:
            detail = (
                f"got [rows, blocks, top_k] = {list(trace.experts.shape)}; the model has {cell[0]} blocks with "
                f"{cell[1]} experts a token: expected the model that sampled"
            )
            cells.fail("routing", "routing_shape", detail)
        else:
            predicting = aligned.sampled[1:]
            there, wanted = int((trace.covered & predicting).sum()), int(predicting.sum())
            if there < wanted:
                detail = f"got the experts of {there} of {wanted} sampled tokens; expected all"
                cells.note("routing", CheckFinding.open_question("routing_incomplete", detail))

    def _trajectory(
        self,
        name: str,
        aligned: AlignedRow,
        logprobs: Nats,
        spans: tuple[VersionSpan, ...],
        sampling: Mapping[SamplingKey, float],
    ) -> Trajectory:
        return Trajectory(
            trajectory_id=name,
            dispatch_id=name,
            prompt_id=name,
            environment="dump",
            token_ids=aligned.token_ids.astype(np.int32),
            sampled=aligned.sampled,
            rollout_logprobs=np.where(aligned.sampled, logprobs, 0.0).astype(np.float32),
            version_spans=spans,
            turns=1,
            tag=_tag(self._settings.engine_dtype, sampling),
            finish_reason=FinishReason.STOP,
            timings=Timings(started_at_s=0.0, generation_s=0.0),
            routing=aligned.routing,
        )


def without_versions(trajectory: Trajectory) -> Trajectory:
    """The same with every token under version 0, for a dump that is scored with one model."""
    return replace(trajectory, version_spans=_of_base(trajectory.sampled))


def _of_base(sampled: NDArray[np.bool_]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(BASE, start, end) for start, end in sampled_runs(sampled))


def _has_no_log(each: RowFinding) -> bool:
    """Then there is nothing to compare."""
    return each.finding.code in ("logprobs_missing", "logprobs_all_zero")


def _tag(engine_dtype: str, sampling: Mapping[SamplingKey, float]) -> EngineTag:
    """What is known of the engine that sampled a dump."""
    return EngineTag(
        engine="dump",
        engine_version="",
        replica=0,
        weights_dtype=engine_dtype,
        kv_dtype=engine_dtype,
        quantization="none",
        logprob_semantics=LogprobSemantics.PROCESSED,
        kv_across_versions="recompute",
        temperature=sampling["temperature"],
        top_p=sampling["top_p"],
        top_k=int(sampling["top_k"]),
        tokenizer_fingerprint="",
        chat_template_digest="",
        weights_digest="",
    )
