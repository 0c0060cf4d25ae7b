"""The torch engine without its thread: admission, cohorts, pauses, weights. Synchronous and stepwise.

One `step` admits what fits and gives every live row one token. All methods are called from one thread; between two
steps every row stands at a token boundary, so a policy label never changes inside a token.
"""

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.config import TorchEngineConfig
from rollout.engines.sampling.draw_keys import request_keys
from rollout.engines.sampling.sampling import uniforms
from rollout.engines.serving.requests import NOTHING, check_ids, tokens_left
from rollout.engines.torch.cohort import Cohort, Row
from rollout.engines.torch.model import DecodeModel
from rollout.engines.torch.routing import RoutingCapture
from rollout.engines.torch.weights import WeightLoader
from rollout.errors import ConcordError, EngineError, UserError
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, TokenChunk
from rollout.types.weights import ApplyReport, WeightManifest

_SCORE_CHUNK_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class SampleDone:
    """One sample has ended."""

    request_id: str
    chunks: list[TokenChunk]


class DecodeCore:
    """See the module."""

    def __init__(self, config: TorchEngineConfig, identity: EngineIdentity, manifest: WeightManifest) -> None:
        """Build the model that the manifest's directory describes and load its weights.

        Raises:
            UserError: the directory or the limits cannot work.
            EngineError: the weights cannot be read or are not complete.
        """
        self._config, self._identity = config, identity
        if config.num_gpus and not torch.cuda.is_available():
            raise UserError(
                f"got engine.num_gpus = {config.num_gpus}, but torch sees no GPU; set it to 0 or install a CUDA build "
                "of torch"
            )
        device = torch.device("cuda" if config.num_gpus else "cpu")
        self._model = DecodeModel(Path(manifest.location), getattr(torch, config.dtype), device)
        self._loader = WeightLoader(self._model.module)
        self.digest, self.policy = self._loader.receive(manifest), manifest.policy
        self._model.check()
        routed = config.return_routing
        self._routing = RoutingCapture(self._model.module, self._model.config) if routed else None
        self._context_tokens = _context(config.max_model_len, self._model.context_tokens)
        self._cohorts: list[Cohort] = [] if identity.deterministic else [Cohort(self._model, self._routing)]
        self._waiting: deque[list[Row]] = deque()
        self._held: deque[list[Row]] = deque()
        """What came while the engine drains."""
        self._pause_mode: PauseMode | None = None
        self._paused_at_s = 0.0
        self.generated_tokens = 0
        self.broken: EngineError | None = None
        """Set when the loaded weights are a mixture of old and new: no token may be sampled from them."""

    @property
    def num_samples(self) -> int:
        """Samples being generated or queued."""
        return self._num_live + sum(len(piece) for queue in (self._waiting, self._held) for piece in queue)

    @property
    def can_step(self) -> bool:
        """Whether a step would do anything."""
        return (
            self.broken is None
            and (self._pause_mode is None or self._pause_mode is PauseMode.DRAIN)
            and bool(self._waiting or self._num_live)
        )

    @property
    def sampling_has_stopped(self) -> bool:
        """Paused, and for DRAIN also drained."""
        return self._pause_mode is not None and not self.can_step

    @property
    def _live(self) -> list[Cohort]:
        return [cohort for cohort in self._cohorts if cohort.rows]

    @property
    def _num_live(self) -> int:
        return sum(len(cohort.rows) for cohort in self._cohorts)

    def submit(self, request: GenerationRequest, produced: NDArray[np.int32] = NOTHING) -> None:
        """Queue a request, or the rest of a sample that has `produced` so far (`max_new_tokens` counts it).

        Raises:
            UserError: the prompt leaves no room for a token, or holds ids that the model does not have.
        """
        if self.broken is not None:
            raise EngineError(
                f"request {request.request_id}: the engine is broken ({self.broken}); restart the replica"
            )
        rows = self._rows(request, produced)
        limit = self._config.max_num_seqs
        queue = self._waiting if self._pause_mode is None else self._held
        queue.extend(rows[i : i + limit] for i in range(0, len(rows), limit))

    @torch.inference_mode()
    def step(self) -> list[SampleDone]:
        """Admit what fits and give every live row one token; the samples that ended."""
        done: list[Row] = []
        for cohort in self._live:
            done += cohort.step(self.policy)
            self.generated_tokens += len(cohort.rows)
        done += self._admit()
        self._drop_empty()
        self.generated_tokens += len(done)
        return [self._done(row) for row in done]

    @torch.inference_mode()
    def abort(self, request_id: str) -> list[SampleDone]:
        """End the samples of a request where they stand."""
        gone: list[Row] = []
        for cohort in self._cohorts:
            rows = [row for row in cohort.rows if row.request.request_id == request_id]
            cohort.remove(rows)
            gone += rows
        self._drop_empty()
        for queue in (self._waiting, self._held):
            for piece in [piece for piece in queue if piece[0].request.request_id == request_id]:
                queue.remove(piece)
                gone += piece
        for row in gone:
            row.abort()
        return [self._done(row) for row in gone]

    @torch.inference_mode()
    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """[T] ids -> [T - 1] raw log-probs in nats; logits exist for a chunk of positions only."""
        check_ids("score", token_ids, self._model.vocab_size)
        if token_ids.size > self._context_tokens:
            raise UserError(f"got {token_ids.size} tokens to score; the context has {self._context_tokens}")
        ids = torch.from_numpy(token_ids.astype(np.int64)).to(self._model.device)
        hidden = self._model.prefill(ids.unsqueeze(0))[0][0]
        if self._routing is not None:
            self._routing.clear()
        parts: list[torch.Tensor] = []
        for start in range(0, ids.shape[0] - 1, _SCORE_CHUNK_TOKENS):
            end = min(start + _SCORE_CHUNK_TOKENS, ids.shape[0] - 1)
            logprobs = torch.log_softmax(self._model.logits(hidden[start:end]), dim=-1)
            parts.append(logprobs.gather(1, ids[start + 1 : end + 1, None]).squeeze(1))
        return torch.cat(parts).cpu().numpy() if parts else np.zeros(0, dtype=np.float32)

    def pause(self, mode: PauseMode) -> None:
        """Stop at this token boundary; under DRAIN go on until `sampling_has_stopped`. A second pause changes
        nothing."""
        if self._pause_mode is None:
            self._pause_mode = mode
            self.note_pause()

    def note_pause(self) -> None:
        """Sampling has stopped now: the pause is timed from here."""
        self._paused_at_s = time.monotonic()

    @torch.inference_mode()
    def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Load weights and label; rebuild the KV of running rows unless the pause keeps it.

        Raises:
            EngineError: not paused (harmless), or the weights are unusable (the engine is then broken).
        """
        if not self.sampling_has_stopped:
            raise EngineError(f"got weights {manifest.policy.key} while sampling; pause the engine first")
        try:
            self.digest = self._loader.receive(manifest)
        except ConcordError as error:
            self.broken = EngineError(str(error))
            raise
        self.policy = manifest.policy
        if self._pause_mode is PauseMode.RECOMPUTE:
            for cohort in self._live:
                cohort.rebuild()
        interrupted = {row.request.request_id for cohort in self._cohorts for row in cohort.rows}
        return ApplyReport(
            policy=manifest.policy,
            digest=self.digest,
            pause_s=time.monotonic() - self._paused_at_s,
            interrupted=len(interrupted),
        )

    def resume(self) -> None:
        """Go on; what came during the pause is admitted behind what waited before it."""
        self._pause_mode = None
        self._waiting.extend(self._held)
        self._held.clear()

    def _admit(self) -> list[Row]:
        """Take waiting pieces in order while rows are free: into the one cohort, or in deterministic mode each into its
        own."""
        pieces: list[list[Row]] = []
        free = self._config.max_num_seqs - self._num_live
        while self._waiting and len(self._waiting[0]) <= free:
            free -= len(self._waiting[0])
            pieces.append(self._waiting.popleft())
        if not pieces:
            return []
        finished: list[Row] = []
        batches = [[piece] for piece in pieces] if self._identity.deterministic else [pieces]
        for batch in batches:
            if self._identity.deterministic:
                self._cohorts.append(Cohort(self._model, self._routing))
            finished += self._cohorts[-1].admit(batch, self.policy)
        self.generated_tokens += sum(map(len, pieces)) - len(finished)
        return finished

    def _drop_empty(self) -> None:
        if self._identity.deterministic:
            self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]

    def _done(self, row: Row) -> SampleDone:
        return SampleDone(row.request.request_id, row.chunks(self.policy))

    def _rows(self, request: GenerationRequest, produced: NDArray[np.int32]) -> list[Row]:
        given = np.concatenate([request.prompt_ids, produced])
        check_ids(f"request {request.request_id}", given, self._model.vocab_size)
        max_tokens = tokens_left(request, produced.size, self._context_tokens)
        stop_ids = frozenset() if request.sampling.ignore_eos else frozenset(request.eos_ids)
        prompt = given.tolist()
        return [
            Row(
                request=request,
                sample_index=i,
                given=prompt,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                uniforms=uniforms(key, produced.size, max_tokens),
            )
            for i, key in enumerate(request_keys(request, self._identity.seed, self._identity.replica))
        ]


def _context(wanted: int | None, own: int | None) -> int:
    if wanted is not None and own is not None and wanted > own:
        raise UserError(f"got engine.max_model_len = {wanted}; the model was made for {own} tokens: lower it")
    context = wanted or own
    if context is None:
        raise UserError("the model's config names no max_position_embeddings; set engine.max_model_len")
    return context
