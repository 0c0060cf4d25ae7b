"""What a run keeps of its gradient searches: `gradloc/KEY.json` for people, sums for the metrics, fields for the event.
It never searches.

A step that is taken twice (the first time it was skipped) has its searches in one file, in order.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from orchestrator.run_dir.layout import RunDir, write_atomic
from orchestrator.run_dir.side_files import SideFileError, SideFiles
from rollout.errors import UserError, boundary
from rollout.tokenization.tokenizer import Tokenizer
from rollout.types.weights import PolicyVersion
from trainer.types.gradloc import Culprit, GradLocEvidence

_Taken = TypeVar("_Taken")


class SearchRecords:
    """The searches of one driver's life."""

    def __init__(
        self,
        folder: Path | None = None,
        tokenizer: Callable[[], Tokenizer] | None = None,
        side_files: SideFiles | None = None,
    ) -> None:
        """Without a folder only the sums are kept; without a tokenizer tokens have no text. The tokenizer is asked for
        at the first search.

        A file that cannot be written is reported to `side_files`; without them it raises.
        """
        self._side_files = side_files
        self._folder, self._make_tokenizer = folder, tokenizer
        self._tokenizer: Tokenizer | None = None
        self.outcomes: Counter[str] = Counter()
        self.types: Counter[str] = Counter()
        """Culprits by type."""
        self.passes = 0
        self.seconds = 0.0

    def keep(self, policy: PolicyVersion, evidence: GradLocEvidence, saved: str = "") -> dict[str, Any]:
        """Keep the search of the step that was to produce `policy`; the answer is what its event says.

        Args:
            saved: folder in `saved_steps` that holds the step's batch, if any.
        """
        self.outcomes[evidence.outcome] += 1
        self.types.update(culprit.type for culprit in evidence.culprits)
        self.passes += evidence.passes
        self.seconds += evidence.seconds
        document = self._document(evidence) | {"saved": saved}
        if self._folder is not None:
            path = self._folder / f"{policy.key}.json"
            name = f"{self._folder.name}/{path.name}"
            with nullcontext() if self._side_files is None else self._side_files.spared(name):
                _write(path, policy, document)
        return _event(policy, document)

    def _document(self, evidence: GradLocEvidence) -> dict[str, Any]:
        fields = _plain(evidence)
        fields["exceeds_after"] = evidence.exceeds_after
        fields["culprits"] = [_plain(culprit) | self._text(culprit) for culprit in evidence.culprits]
        return fields

    def _text(self, culprit: Culprit) -> dict[str, str]:
        at, ids = culprit.position - culprit.context_start, culprit.context_token_ids
        return {
            "text_before": self._decoded(ids[:at]),
            "token_text": self._decoded(ids[at : at + 1]),
            "text_after": self._decoded(ids[at + 1 :]),
        }

    def _decoded(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None and self._make_tokenizer is not None:
            self._tokenizer = self._make_tokenizer()
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(np.array(ids, dtype=np.int32), skip_special_tokens=False)


def _write(path: Path, policy: PolicyVersion, document: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    before: list[Any] = []
    if path.exists():
        with boundary(SideFileError, f"{path} is broken and stays as it is; this search is in its event alone"):
            before = json.loads(path.read_bytes())["searches"]
    whole = {"policy": policy.key, "step": policy.version, "searches": [*before, document]}
    write_atomic(path, json.dumps(whole, indent=2, allow_nan=False) + "\n")


def _plain(evidence: GradLocEvidence | Culprit) -> dict[str, Any]:
    """Fields as JSON: pairs by block become an object, a policy its key, and what is not a finite number null."""
    return {
        field.name: _value(field.name, getattr(evidence, field.name))
        for field in dataclasses.fields(evidence)
        if field.name != "culprits"
    }


def _value(name: str, value: object) -> object:
    if isinstance(value, PolicyVersion):
        return value.key
    if name.startswith("block_"):
        return {block: _number(number) for block, number in cast("tuple[tuple[str, float], ...]", value)}
    if isinstance(value, tuple):
        return list(cast("tuple[int, ...]", value))
    return _number(value) if isinstance(value, float) else value


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


_OF_THE_SEARCH = (
    *("outcome", "trigger", "action", "acted", "loss", "grad_norm", "threshold", "tau", "explained"),
    *("passes", "tokens_forwarded", "seconds", "removed_terms", "grad_norm_after", "exceeds_after", "saved"),
)
_OF_THE_CULPRIT = (
    *("token_id", "token_text", "text_before", "text_after", "trajectory_id", "position", "policy", "replica", "type"),
    *("d_engine", "d_stale", "omega", "sequence_ratio", "advantage", "entropy", "logprob", "norm"),
)


def _event(policy: PolicyVersion, document: dict[str, Any]) -> dict[str, Any]:
    """One row: the search, and its first culprit; norms of blocks and all others are in the file."""
    culprits = document["culprits"]
    search = {name: document[name] for name in _OF_THE_SEARCH}
    first = {name: culprits[0][name] for name in _OF_THE_CULPRIT} if culprits else {}
    return {"step": policy.version, **search, "culprits": len(culprits), **first}


def read_searches(run: RunDir) -> list[dict[str, Any]]:
    """The files of `gradloc/`, in the order of epochs and steps.

    Raises:
        UserError: there is none, or one is broken.
    """
    found = [stored_search(file) for file in search_files(run.gradloc)]
    if not found:
        raise UserError(
            f"run {run.path} has no gradient search: no step's norm was above its threshold, no block's scale below "
            "trainer.gradloc.scale_floor, and nothing was not finite; to search sooner lower "
            "trainer.gradloc.threshold.multiple, or check that trainer.gradloc.enabled is true"
        )
    return found


def readable_searches(
    folder: Path, take: Callable[[Mapping[str, Any]], Iterable[_Taken]]
) -> tuple[list[_Taken], list[str]]:
    """What `take` makes of each file of `folder`, in order; and which files it can make nothing of, and why."""
    found: list[_Taken] = []
    left_out: list[str] = []
    for file in search_files(folder):
        try:
            with boundary(UserError, f"cannot read {file} (move the file away, or copy the run directory again)"):
                found += list(take(stored_search(file)))
        except UserError as error:
            left_out.append(str(error))
    return found, left_out


def search_files(folder: Path) -> list[Path]:
    """`eE-vN.json` in the order of epochs and steps; behind them what is named almost so."""
    return sorted(folder.glob("e*-v*.json"), key=_place)


def _place(file: Path) -> tuple[float, float, str]:
    try:
        policy = PolicyVersion.parse(file.stem)
    except ValueError:
        return (math.inf, math.inf, file.name)
    return (policy.trainer_epoch, policy.version, file.name)


def stored_search(file: Path) -> dict[str, Any]:
    """What one file holds.

    Raises:
        UserError: it is broken, or its name is not that of its step.
    """
    with boundary(
        UserError, f"cannot read {file} (copy the run directory again, or move the file away to see the others)"
    ):
        document = cast("dict[str, Any]", json.loads(file.read_bytes()))
        if document["policy"] != file.stem:
            raise ValueError(f"it holds the search of step {document['policy']}")
        return {name: document[name] for name in ("policy", "step", "searches")}
