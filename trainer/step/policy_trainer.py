"""One trainer rank: groups in, new weights out.

    groups and evidence -> decode -> batcher -> packing -> (forward, backward) a micro-batch -> clip, AdamW
    -> StepReport

Every method but `save_step`, `open_transfer` and `close` is collective: all ranks call it with the same arguments. It
knows no Ray, no store and no engine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.errors import UserError
from rollout.types.trajectory import StoredGroups
from rollout.types.weights import Canary, PolicyVersion, WeightManifest
from trainer.batching.batcher import GroupRules, TrainingBatch, build_batch
from trainer.batching.packing import pack
from trainer.batching.quarantine import groups_with_quarantines, quarantined
from trainer.batching.repeats import sample_repeats
from trainer.checkpointing.checkpoints import CheckpointState
from trainer.checkpointing.saved_steps import SavedStep, reason_to_keep, save_step
from trainer.checkpointing.sharded_state import load_checkpoint, save_checkpoint
from trainer.config.trainer import TrainerConfig
from trainer.gradloc.probe.random_states import RandomState
from trainer.loss.ratio_buckets import log_ratios
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, leave_ranks, reshard
from trainer.optim.optimizer import PolicyOptimizer
from trainer.step.gradient_step import GradientReport, GradientSeam, PhaseClock
from trainer.step.noted_loss import NotedLoss
from trainer.types.evidence import audited_groups
from trainer.types.protocols import Algorithm
from trainer.types.step import StepBatches, StepReport, StepRequest
from trainer.weights.weight_writer import WeightWriter

if TYPE_CHECKING:
    from trainer.weights.weight_sender import WeightSender


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerParts:
    """What one rank works with."""

    ranks: Ranks
    model: PolicyModel
    algorithm: Algorithm
    optimizer: PolicyOptimizer
    gradient: GradientSeam
    writer: WeightWriter
    sender: "WeightSender | None"
    """None where weights move through the disk alone."""
    canary_ids: NDArray[np.int32]
    noted: NotedLoss
    """The loss inside `gradient`, watched."""


class PolicyTrainer:
    """One rank of `config.ranks`, in a process of its own."""

    def __init__(self, config: TrainerConfig, seed: int, parts: TrainerParts) -> None:
        self._config, self._seed = config, seed
        self._ranks, self._model, self._algorithm = parts.ranks, parts.model, parts.algorithm
        self._optimizer, self._gradient = parts.optimizer, parts.gradient
        self._writer, self._sender, self._canary_ids = parts.writer, parts.sender, parts.canary_ids
        self._noted = parts.noted
        self._published: WeightManifest | None = None
        self._random = RandomState.take(self._ranks.device)

    def step(self, groups: StoredGroups, request: StepRequest) -> StepReport:
        """One optimizer step on encoded groups; every rank gets all and takes its own share.

        Raises:
            UserError: the batch mixes sampling temperatures, or its groups do not suit the algorithm.
        """
        if self._sender is not None:
            self._sender.release()
        self._random = RandomState.take(self._ranks.device)
        clock = PhaseClock()
        audited = audited_groups(groups)
        clock.end("decode")
        batch = build_batch(
            audited,
            self._algorithm,
            request.oldest_version,
            self._config.algorithm.aggregation,
            request.old_logprobs,
            GroupRules.of(self._config.algorithm),
        )
        packed: StepBatches = pack(batch.samples, self._ranks.world, self._config.micro_batch_tokens)
        clock.end("pack")
        self._noted.begin(request.audited)
        done = self._gradient.run(request.policy.version, packed, batch, audited, clock)
        taken_out = quarantined(audited, done.evidence)
        report = _report(
            request,
            batch,
            packed,
            done,
            clock,
            statistics=self._algorithm.statistics,
            has_reference=self._config.algorithm.kl_coef > 0,
        )
        repeats, expected = sample_repeats(each.group for each in audited)
        return replace(
            report,
            quarantined=taken_out,
            quarantined_groups=groups_with_quarantines(audited, taken_out),
            sample_repeats=repeats,
            sample_repeats_expected=expected,
            audited=self._ranks.gathered(self._noted.take()) if request.audited else (),
        )

    def save_step(self, parent: Path, groups: StoredGroups, request: StepRequest, report: StepReport) -> StepReport:
        """Keep the batch of the last step below `parent`, with what a replay needs, if it is one to keep. On rank 0
        only; not collective.

        Returns:
            The report with the folder's name, and with those that made room for it; the report as it is where there is
            nothing to keep, or with the reason where the disk refuses it.

        Raises:
            UserError: no weights were published before the step.
        """
        reason = reason_to_keep(report, self._config.saved_steps)
        if not reason:
            return report
        if self._published is None:
            raise UserError(
                f"got a step to keep for {request.policy.key}, and no weights were published before it; publish the "
                "weights that it starts from"
            )
        whole = (
            report if report.skipped or report.gradloc is None else report.gradloc
        )  # what is applied may lack the culprits' terms
        saved = SavedStep(
            groups=groups,
            request=request,
            random_state=self._random.cpu.numpy(),
            seed=self._seed,
            dtype=self._config.dtype,
            ranks=self._ranks.world,
            weights=self._published.policy,
            weights_digest=self._published.digest,
            reason=reason,
            applied=not report.skipped,
            loss=whole.loss,
            grad_norm=whole.grad_norm,
            tau=math.nan if report.gradloc is None else report.gradloc.tau,
            planted=report.planted,
        )
        try:
            name, removed = save_step(parent, saved, self._config.saved_steps.keep)
        except UserError as error:
            return replace(report, not_saved=str(error))
        return replace(report, saved=name, saves_removed=removed)

    def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Raw log-probs of given tokens under the current weights: [T] -> [T - 1] nats."""
        ids = torch.tensor(token_ids, dtype=torch.int64, device=self._ranks.device)
        positions = torch.arange(ids.numel() - 1, device=self._ranks.device)
        with torch.no_grad():
            logprobs, _ = self._model(ids[None, :-1], positions, ids[1:], 1.0)
        reshard(self._model)
        return logprobs.cpu().numpy()

    def publish(self, policy: PolicyVersion, directory: Path) -> WeightManifest | None:
        """Write the current weights as a model directory named `policy`; rank 0 returns the manifest.

        Raises:
            UserError: the directory exists or cannot be written.
        """
        self._published = self._writer.write(
            policy, directory, lambda: Canary(token_ids=self._canary_ids, logprobs=self.score(self._canary_ids))
        )
        return self._published

    def open_transfer(
        self, manifest: WeightManifest, members: Sequence[tuple[int, int]], workers: int, place: str
    ) -> WeightManifest:
        """The manifest by which engines receive from GPU to GPU what was just published. On rank 0 only; not
        collective.

        Raises:
            UserError: the transport is disk.
        """
        return self._gpu_sender().open(manifest, self._writer.order, members, workers, place)

    def send(self, manifest: WeightManifest) -> None:
        """Send the current weights under a manifest of `open_transfer`.

        Raises:
            UserError: the transport is disk.
            WeightSyncError: the transfer broke off.
        """
        self._gpu_sender().send(manifest)

    def _gpu_sender(self) -> "WeightSender":
        if self._sender is None:
            raise UserError('got a transfer from GPU to GPU with weights.transport = "disk"; set it to "nccl" or "ipc"')
        return self._sender

    def save_checkpoint(self, directory: Path, state: CheckpointState) -> None:
        """Write model, optimizer, random state and `state`; complete or absent.

        Raises:
            UserError: the directory exists or cannot be written.
        """
        save_checkpoint(directory, state, self._model, self._optimizer, self._ranks, self._gradient.search)

    def load_checkpoint(self, directory: Path) -> CheckpointState:
        """Continue from a checkpoint, whatever number of ranks wrote it.

        Raises:
            UserError: it is incomplete, damaged, or of another model.
        """
        return load_checkpoint(directory, self._model, self._optimizer, self._ranks, self._gradient.search)

    def close(self) -> None:
        """Leave the engines and the other ranks."""
        if self._sender is not None:
            self._sender.close()
        leave_ranks()


def _report(
    request: StepRequest,
    batch: TrainingBatch,
    packed: StepBatches,
    done: GradientReport,
    clock: PhaseClock,
    *,
    statistics: Sequence[str],
    has_reference: bool,
) -> StepReport:
    sums, optimizer = done.totals, done.optimizer
    tokens = max(1.0, sums["tokens"])
    expected, replayed = sums["routing_expected"], sums["routing_replayed"]
    return StepReport(
        policy=request.policy,
        loss=sums["loss"],
        grad_norm=optimizer.grad_norm,
        learning_rate=optimizer.learning_rate,
        num_tokens=round(sums["tokens"]),
        num_tokens_forwarded=sum(micro.token_ids.size for rank in packed for micro in rank),
        num_micro_batches=len(packed[0]),
        policy_entropy=sums["entropy"] / tokens,
        clip_fraction_low=sums.get("clip_fraction_low", 0.0) / tokens,
        clip_fraction_high=sums.get("clip_fraction_high", 0.0) / tokens,
        approx_kl=sums["approx_kl"] / tokens,
        mean_abs_logprob_difference=sums["logprob_difference"] / tokens,
        reference_kl=sums["reference_kl"] / tokens,
        mean_abs_rollout_difference=sums["rollout_difference"] / tokens,
        mean_abs_engine_difference=sums["engine_difference"] / tokens,
        correction_weight_mean=sums["weight"] / tokens,
        correction_ess=sums["weight"] ** 2 / (tokens * sums["weight_squared"]) if sums["weight_squared"] else 0.0,
        correction_zero_fraction=sums["weight_zero"] / tokens,
        old_logprob_source=batch.old_logprob_source,
        advantage_std=batch.advantage_std,
        trained_ids=frozenset(
            s.trajectory_id
            for s in batch.samples
            if np.count_nonzero(s.loss_mask) > done.removed.get(s.trajectory_id, 0)
        ),
        masked_ids=batch.masked_ids | done.removed.keys(),
        zero_variance_groups=batch.zero_variance_groups,
        dropped_groups=batch.dropped_groups,
        phases_s=tuple(clock.phases),
        skipped=optimizer.skipped,
        gradloc=done.evidence,
        block_norms=optimizer.block_norms,
        block_scales=optimizer.block_scales,
        block_thresholds=optimizer.block_thresholds,
        statistics=tuple((name, sums[name] / tokens) for name in statistics),
        reward_parts=batch.reward_parts,
        reference_kls=tuple(
            (estimator, sums[f"reference_{estimator}"] / tokens) for estimator in ("k1", "k3") if has_reference
        ),
        log_ratios=log_ratios(sums, batch.old_logprob_source),
        planted=done.planted,
        probes=done.probes,
        attention_logits=done.attention_logits,
        routing_replayed_fraction=replayed / expected if expected else 0.0,
        routing_fallback_fraction=(expected - replayed) / expected if expected else 0.0,
    )
