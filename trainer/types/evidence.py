"""What the service finds about a trajectory, and its binary form: an annotation that the store keeps with the group.
Torch-free.

A finding says what was checked and what came out; the verdict follows from the findings; the attribution says which
causes explain the gap, in nats.
"""

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from rollout.errors import ConcordError, boundary
from rollout.types.codec import decode
from rollout.types.trajectory import StoredGroups, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.types.step import Verdict

ANNOTATION_KIND = "verdict"
"""Kind of the store's annotation; it moves a group from ready to audited."""
_MAGIC = b"CEV1"


class GapCause(StrEnum):
    """Why engine and trainer differ, in the order in which causes are tried."""

    TOKENIZER = "tokenizer"
    """Other tokens, or a broken structure: weights cannot repair it."""
    LOGPROB_SEMANTICS = "logprob_semantics"
    """The log belongs to another distribution: raw, after temperature, or after truncation."""
    WEIGHT_SYNC = "weight_sync"
    """The replica computes with other weights than those published under its version."""
    VERSION_TAG = "version_tag"
    """The weights are right, their version in the log is not."""
    ROUTING = "routing"
    """Other experts were chosen."""
    PRECISION = "precision"
    """Other number formats."""
    STALE_KV = "stale_kv"
    """Keys and values that older weights wrote."""
    LOW_PROBABILITY_TAIL = "low_probability_tail"
    """A few unlikely tokens; the mean is fine."""
    UNKNOWN = "unknown"
    """The residual."""


class Check(StrEnum):
    """Which agreement a finding is about."""

    STRUCTURE = "structure"
    """Lengths, ids, prefix, mask, begin token."""
    TOKENIZER = "tokenizer"
    """Fingerprint, probe texts, drift."""
    SEMANTICS = "semantics"
    """Which distribution the log-probs belong to."""
    VERSION = "version"
    """Spans against the ledger, digests, canary."""
    PRECISION = "precision"
    """Declared dtypes and the measured gap."""
    ROUTING = "routing"
    """Experts, per block."""
    EVIDENCE = "evidence"
    """Something that a check needs is missing."""
    GRADIENT = "gradient"
    """What the trainer's gradient search found."""


class CheckSeverity(StrEnum):
    """How bad a finding is."""

    INCOMPLETE = "incomplete"
    """Could not be checked."""
    WARN = "warn"
    """People should know."""
    FAIL = "fail"
    """The trajectory must not be trained on as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckFinding:
    """One result of a check that was not fine."""

    check: Check
    severity: CheckSeverity
    code: str
    """Short and stable, such as `doubled_bos`; a label, never an id."""
    detail: str
    """Got, expected, in words."""
    positions: tuple[int, ...] = ()
    """Tokens that it is about; empty: the whole trajectory."""

    @classmethod
    def open_question(
        cls, code: str, detail: str, positions: tuple[int, ...] = (), check: Check = Check.EVIDENCE
    ) -> "CheckFinding":
        return cls(check=check, severity=CheckSeverity.INCOMPLETE, code=code, detail=detail, positions=positions)

    @classmethod
    def failure(cls, check: Check, code: str, detail: str, positions: tuple[int, ...] = ()) -> "CheckFinding":
        """The trajectory must not be trained on as it is."""
        return cls(check=check, severity=CheckSeverity.FAIL, code=code, detail=detail, positions=positions)

    @property
    def failed(self) -> bool:
        return self.severity is CheckSeverity.FAIL

    @property
    def breaks_tokens(self) -> bool:
        """Whether it failed by other tokens or a broken structure, which no weight repairs."""
        return self.failed and self.check in (Check.STRUCTURE, Check.TOKENIZER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attribution:
    """Which causes explain a gap. `sum(parts) + residual = gap`, in nats: mean |d| over the tokens in question."""

    gap: float
    parts: tuple[tuple[GapCause, float], ...]
    """In the order in which they were tried; only causes that explain something."""
    residual: float
    """What no cause explains."""
    readings: tuple[str, ...] = ()
    """What closed each part, in words with its value, such as `temperature 0.7`; one a part, empty where the cause says
    it all."""

    @property
    def read_parts(self) -> tuple[tuple[GapCause, float, str], ...]:
        """(cause, nats, reading) of each part."""
        readings = (*self.readings, *[""] * len(self.parts))
        return tuple((cause, nats, reading) for (cause, nats), reading in zip(self.parts, readings, strict=False))

    @property
    def first(self) -> GapCause:
        """The cause that explains most; `unknown` when the residual is larger than every part."""
        best = max(self.parts, key=lambda part: part[1], default=(GapCause.UNKNOWN, 0.0))
        return best[0] if best[1] >= self.residual else GapCause.UNKNOWN

    @property
    def explained(self) -> float:
        """Share of the gap that the parts explain; 1 without a gap."""
        return 1.0 if self.gap <= 0.0 else sum(nats for _, nats in self.parts) / self.gap


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrajectoryEvidence:
    """All that is known of one trajectory. Arrays are token-aligned."""

    trajectory_id: str
    scored: NDArray[np.bool_]
    """[T] True where `behaviour_logprobs` holds the trainer's log-prob at the version that sampled the token."""
    behaviour_logprobs: NDArray[np.float32]
    """[T] nats, 0 where not scored. d_engine = behaviour - rollout."""
    verdict: Verdict
    masked: NDArray[np.bool_]
    """[T] tokens that leave the loss (verdict mask only)."""
    findings: tuple[CheckFinding, ...] = ()
    attribution: Attribution | None = None
    suspects: tuple[int, ...] = ()
    """Positions that GradLoc should look at first."""

    def __post_init__(self) -> None:
        if not self.scored.shape == self.behaviour_logprobs.shape == self.masked.shape:
            shapes = f"{self.scored.shape}, {self.behaviour_logprobs.shape}, {self.masked.shape}"
            raise ValueError(
                f"evidence of {self.trajectory_id}: scored, log-probs and mask have shapes {shapes}; expected one [T]"
            )

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.code for f in self.findings if f.failed))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupEvidence:
    """The evidence of a group, one entry a trajectory, in the group's order."""

    dispatch_id: str
    replica: int
    policies: tuple[PolicyVersion, ...]
    """Versions at which it was scored."""
    trajectories: tuple[TrajectoryEvidence, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AuditedGroup:
    """A group with what the service found about it; None where it was not scored: then all of it is accepted as
    logged."""

    group: TrajectoryGroup
    evidence: GroupEvidence | None = None

    def __post_init__(self) -> None:
        if self.evidence is None:
            return
        audited = [(e.trajectory_id, e.scored.shape) for e in self.evidence.trajectories]
        wanted = [(t.trajectory_id, t.token_ids.shape) for t in self.group.trajectories]
        if audited != wanted:
            raise ValueError(f"group {self.group.dispatch_id}: its evidence is about {audited}; expected {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One trajectory in the header of encoded evidence."""

    id: str
    size: int
    verdict: Verdict
    suspects: tuple[int, ...]
    findings: tuple[CheckFinding, ...]
    attribution: Attribution | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    dispatch_id: str
    replica: int
    policies: tuple[str, ...]
    trajectories: tuple[_Row, ...]


_HEADER = TypeAdapter(_Header)


def audited_group(payload: NDArray[np.uint8], verdict: bytes) -> AuditedGroup:
    """A stored group and its newest verdict annotation (empty: not scored), decoded.

    Raises:
        ConcordError: one of the two is damaged.
    """
    return AuditedGroup(group=decode(payload), evidence=decode_evidence(verdict) if verdict else None)


def audited_groups(groups: StoredGroups) -> list[AuditedGroup]:
    """`audited_group` of each, in their order."""
    return [audited_group(payload, verdict) for payload, verdict in zip(groups.payloads, groups.verdicts, strict=True)]


def encode_evidence(evidence: GroupEvidence) -> bytes:
    """Magic, length of the JSON header, header, then the float32 log-probs and the bit-packed masks of all
    trajectories."""
    rows = [
        _Row(
            id=trajectory.trajectory_id,
            size=trajectory.scored.size,
            verdict=trajectory.verdict,
            suspects=trajectory.suspects,
            findings=trajectory.findings,
            attribution=trajectory.attribution,
        )
        for trajectory in evidence.trajectories
    ]
    document = _Header(
        dispatch_id=evidence.dispatch_id,
        replica=evidence.replica,
        policies=tuple(policy.key for policy in evidence.policies),
        trajectories=tuple(rows),
    )
    header = json.dumps(asdict(document), separators=(",", ":")).encode()
    logprobs = np.concatenate([t.behaviour_logprobs for t in evidence.trajectories]).astype("<f4")
    scored, masked = (
        np.packbits(np.concatenate(columns))
        for columns in zip(*((t.scored, t.masked) for t in evidence.trajectories), strict=True)
    )
    body = logprobs.tobytes() + scored.tobytes() + masked.tobytes()
    return _MAGIC + len(header).to_bytes(4, "little") + header + body


def decode_evidence(payload: bytes) -> GroupEvidence:
    """The inverse of `encode_evidence`.

    Raises:
        ConcordError: the bytes are damaged or of another format.
    """
    if payload[:4] != _MAGIC:
        raise ConcordError(
            f"evidence starts with {payload[:4]!r}; expected {_MAGIC!r}: it was written by another version of Concord"
        )
    with boundary(ConcordError, "evidence is damaged"):
        size = int.from_bytes(payload[4:8], "little")
        header = _HEADER.validate_json(payload[8 : 8 + size])
        lengths = [row.size for row in header.trajectories]
        total, at = sum(lengths), 8 + size
        packed, ends = -(-total // 8), np.cumsum(lengths).tolist()
        logprobs = np.frombuffer(payload, dtype="<f4", count=total, offset=at)
        scored, masked = (
            np.unpackbits(np.frombuffer(payload, np.uint8, packed, start), count=total).astype(np.bool_)
            for start in (at + 4 * total, at + 4 * total + packed)
        )
        return GroupEvidence(
            dispatch_id=header.dispatch_id,
            replica=header.replica,
            policies=tuple(PolicyVersion.parse(key) for key in header.policies),
            trajectories=tuple(
                TrajectoryEvidence(
                    trajectory_id=row.id,
                    scored=scored[end - row.size : end],
                    behaviour_logprobs=logprobs[end - row.size : end],
                    verdict=row.verdict,
                    masked=masked[end - row.size : end],
                    findings=row.findings,
                    attribution=row.attribution,
                    suspects=row.suspects,
                )
                for row, end in zip(header.trajectories, ends, strict=True)
            ),
        )
