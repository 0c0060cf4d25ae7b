"""Config of the trainer room. Torch-free; frozen; unknown keys are errors."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from rollout.config import Section
from trainer.config.consistency import ConsistencyConfig
from trainer.config.gradloc import GradLocConfig


class TinyModelConfig(Section):
    """A character-level Qwen3, built and warm-started on the spot (cached by content digest)."""

    type: Literal["tiny"] = "tiny"
    moe: bool = False
    """Mixture of experts instead of a dense model."""
    seed: int = 0
    """Seed of the first weights and of the warm start's data."""
    tie_embeddings: bool = True
    """The head shares the embedding's weight."""
    target_accuracy: Annotated[float, Field(ge=0, le=1)] = 0.4
    """Sampled accuracy at which the warm start stops; 0 keeps random weights."""


class LocalModelConfig(Section):
    """A local directory with a Hugging Face causal LM and its tokenizer."""

    type: Literal["local"] = "local"
    path: Path
    """The directory (`config.json`, `*.safetensors`, `tokenizer.json`); relative to the working directory."""


ModelConfig = Annotated[TinyModelConfig | LocalModelConfig, Field(discriminator="type")]


class AlgorithmSection(Section):
    """What every policy-gradient algorithm here has: the clipped surrogate and its aggregation."""

    couples_tokens: ClassVar[bool] = False
    """Whether a token's term depends on the other loss tokens of its sequence."""
    compares_group: ClassVar[bool] = True
    """Whether advantages need two trajectories of a prompt or more."""

    clip_low: PositiveFloat = 0.2
    """The importance ratio is clipped at 1 - this."""
    clip_high: PositiveFloat = 0.28
    """The importance ratio is clipped at 1 + this."""
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every token of the batch weighs 1/N; sequence_mean: every trajectory 1/S, its tokens alike."""
    zero_variance_groups: Literal["count", "drop"] = "count"
    """Groups whose advantages are all 0. count: their tokens are in the denominators, so a step with many of them moves
    less, as in verl, TRL and Dr. GRPO; drop: they leave the step before anything is counted, KL and entropy terms
    included, and end as rejected (`no_difference`), as under the dynamic sampling of DAPO."""
    baseline: Literal["group", "trained"] = "group"
    """Whose rewards a trajectory is compared with. group: all of its group, those included of which no token is in the
    loss (rejected, quarantined, stale), as in verl, TRL and DAPO; trained: those with a token in the loss. Where fewer
    than two are left their advantage is 0."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the frozen version 0; 0 loads no reference. Each token's estimate is also multiplied by its
    importance ratio, bounded as in the loss (docs/user/consistency.md)."""
    kl_estimator: Literal["k1", "k3"] = "k3"
    """With p the policy and q version 0: k1 = log(p/q); k3 = q/p - 1 - log(q/p), never negative."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""


class GroupRelativeSection(AlgorithmSection):
    """Group-relative advantages: (reward - mean) / (sample standard deviation + epsilon)."""

    std_epsilon: NonNegativeFloat = 1e-4
    """Added to the standard deviation."""
    normalize_std: bool = True
    """False leaves the division out (Dr. GRPO)."""


class GrpoConfig(GroupRelativeSection):
    """Group-relative advantages: (reward - mean) / (sample standard deviation + epsilon)."""

    type: Literal["grpo"] = "grpo"


class RlooConfig(AlgorithmSection):
    """Leave-one-out advantages: reward - mean of the others."""

    type: Literal["rloo"] = "rloo"


class GspoConfig(GroupRelativeSection):
    """Group-relative advantages as in `grpo`; the importance ratio is the sequence's, the geometric mean over its
    tokens, and a sequence is clipped whole (GSPO)."""

    couples_tokens: ClassVar[bool] = True
    type: Literal["gspo"] = "gspo"
    clip_low: PositiveFloat = 3e-4
    """A sequence's ratio is clipped at 1 - this."""
    clip_high: PositiveFloat = 4e-4
    """A sequence's ratio is clipped at 1 + this."""
    aggregation: Literal["token_mean", "sequence_mean"] = "sequence_mean"
    """sequence_mean: every trajectory 1/S, its tokens alike, as published; token_mean: every token of the batch weighs
    1/N."""


AlgorithmConfig = Annotated[GrpoConfig | RlooConfig | GspoConfig, Field(discriminator="type")]


def check_algorithm(algorithm: AlgorithmConfig, group_size: int, consistency: ConsistencyConfig) -> None:
    """Whether the run gives the algorithm what it needs: trajectories to compare, and its own importance ratio.

    A correction whose weight is itself a ratio can take the place of the surrogate's, which then starts from the policy
    at the start of the step. A token's ratio loses nothing by that; a sequence's would be 1 for all.

    Raises:
        ValueError: with what to set instead.
    """
    if group_size == 1 and algorithm.compares_group:
        raise ValueError(
            f"got run.group_size = 1 with trainer.algorithm.type = {algorithm.type!r}, whose advantages compare the "
            "members of a group; set run.group_size to 2 or more"
        )
    correction = consistency.correction
    decoupled = correction.type == "decoupled"
    recomputed = consistency.mode == "gate" and consistency.when_behind == "wait"
    if algorithm.couples_tokens and correction.carries_ratio and (decoupled or not recomputed):
        cure = "" if decoupled else ', or consistency.mode = "gate" with when_behind = "wait"'
        raise ValueError(
            f"got consistency.correction.type = {correction.type!r} with trainer.algorithm.type = {algorithm.type!r}: "
            "its weights would stand in for the algorithm's own ratio, which would be 1 for every sequence; set "
            f'consistency.correction.type to "seq_clip", "geo_rs", "opsm" or "none"{cure}'
        )


class ScheduleConfig(Section):
    """Learning-rate schedule."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the way from the peak rate to the final one."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of a linear rise to the peak rate."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the peak rate at `run.steps` (linear, cosine)."""


class GlobalClipConfig(Section):
    """No clip but that of the whole gradient at `max_grad_norm`."""

    type: Literal["global"] = "global"


class ClipSection(Section):
    """A clip with a memory. `max_grad_norm` still acts behind it, on the gradient that it leaves."""

    beta: float = 0.99
    """Decay of what it remembers, a step."""

    @model_validator(mode="after")
    def _beta_is_a_decay(self) -> Self:
        if not 0 < self.beta < 1:
            raise ValueError(
                f"got beta = {self.beta:g}, expected a decay between 0 and 1; set it to "
                f"{type(self).model_fields['beta'].default}"
            )
        return self


class LayerClipConfig(ClipSection):
    """Each block (transformer block, embeddings, head) is clipped at alpha times the running norm R of its own
    gradients."""

    type: Literal["layerclip"] = "layerclip"
    mode: Literal["lagged", "paper_ema", "paper_ca"] = "lagged"
    """lagged: R is that of the step before and learns the clipped norm, so no spike excuses itself or poisons later
    steps; paper_ema and paper_ca, as published: the step's own norm enters R, an exponential or a plain mean, before R
    clips it."""
    alpha: float = 2.0
    """A block's gradient keeps its norm up to alpha R."""
    eps: NonNegativeFloat = 1e-6
    """Added to the norm that alpha R is divided by."""
    warmup_steps: PositiveInt = 20
    """Steps of lagged that only learn; published modes have none."""

    @model_validator(mode="after")
    def _can_clip_and_lets_pass(self) -> Self:
        if not self.alpha > 1:
            raise ValueError(
                f"got alpha = {self.alpha:g}, which clips gradients of ordinary size; set alpha above 1, for example 2"
            )
        if self.mode == "paper_ema" and self.alpha * (1 - self.beta) >= 1:
            raise ValueError(
                f"got mode = 'paper_ema' with alpha (1 - beta) = {self.alpha * (1 - self.beta):g}, which never clips: a"
                " spike lifts its own threshold above itself; set beta nearer to 1, or mode = 'lagged'"
            )
        return self


class ZClipConfig(ClipSection):
    """The global norm is clipped where it is an outlier of its own history, by z-score; the farther out, the lower."""

    type: Literal["zclip"] = "zclip"
    alpha: float = 2.5
    """Standard deviations above the mean at which it clips."""
    beta: float = 0.97
    """Decay of the norm's mean and variance, a step."""
    eps: PositiveFloat = 1e-6
    """Added to the standard deviation, and to the norm that the threshold is divided by."""
    warmup_steps: Annotated[int, Field(ge=2)] = 25
    """Steps that only learn mean and variance."""

    @model_validator(mode="after")
    def _lets_pass(self) -> Self:
        if not self.alpha > 0:
            raise ValueError(f"got alpha = {self.alpha:g}, expected standard deviations above 0; set alpha to 2.5")
        return self


class AdaGCConfig(ClipSection):
    """Each block is clipped at `lam` times a running mean of its own clipped norms."""

    type: Literal["adagc"] = "adagc"
    lam: float = 1.05
    """A block's gradient keeps its norm up to this multiple of the mean."""
    beta: float = 0.98
    """Decay of the mean, a step."""
    warmup_steps: PositiveInt = 100
    """Steps that only learn: the mean starts as the block's smallest norm behind `max_grad_norm`."""

    @model_validator(mode="after")
    def _lets_pass(self) -> Self:
        if not self.lam > 1:
            raise ValueError(
                f"got lam = {self.lam:g}, with which norms can only fall; set lam above 1, for example 1.05"
            )
        return self


ClipConfig = Annotated[GlobalClipConfig | LayerClipConfig | ZClipConfig | AdaGCConfig, Field(discriminator="type")]


class QkClipConfig(Section):
    """After the step, query and key weights of heads with larger attention logits than `threshold` are scaled down; not
    for models with QK-norm."""

    enabled: bool = False
    """Measure the logits, export them, and clip."""
    threshold: PositiveFloat = 100.0
    """Attention logit that the largest one of a head is brought down to."""


class OptimizerConfig(Section):
    """AdamW, or Muon for the matrices of transformer blocks and AdamW for the rest, behind a gradient clip."""

    type: Literal["adamw", "muon"] = "adamw"
    """muon: matrices of transformer blocks step along their orthogonalised momentum; embeddings, head and vectors stay
    with AdamW."""
    learning_rate: PositiveFloat = 3e-4
    """The peak rate."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of AdamW's second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay."""
    decay: Literal["matrices", "all"] = "matrices"
    """What `weight_decay` acts on. matrices: not on norms, biases and embeddings (a tied head included)."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients with a larger global L2 norm, after `clip`, are scaled down to it."""
    muon_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of Muon's momentum."""
    muon_scale: Literal["match_rms", "original"] = "match_rms"
    """Factor of the learning rate for a matrix. match_rms: 0.2 sqrt(max(rows, columns)), with which AdamW's rate fits;
    original: sqrt(max(1, rows / columns))."""
    clip: ClipConfig = GlobalClipConfig()
    qk_clip: QkClipConfig = QkClipConfig()
    schedule: ScheduleConfig = ScheduleConfig()

    @model_validator(mode="after")
    def _muon_keys_only_for_muon(self) -> Self:
        fields = type(self).model_fields
        given = sorted(key for key in fields if key.startswith("muon_") and getattr(self, key) != fields[key].default)
        if given and self.type != "muon":
            raise ValueError(
                f'got {given[0]} with type = "adamw", which has none; set trainer.optimizer.type = "muon" or leave'
                " it out"
            )
        return self


class ProbesConfig(Section):
    """Values of each block in `block_metrics/` besides norms and clips, which are always there. Each has its cost
    (docs/user/gradloc.md)."""

    update_ratio: bool = False
    """Norm of the step's change of the block's weights over their norm; one more copy of this rank's weights during the
    update."""
    activations: bool = False
    """Root mean square and kurtosis of what the block hands on."""
    router_load: bool = False
    """How the experts of a mixture share the tokens: the busiest one's load over the mean, and the entropy of the
    shares."""


class CheckpointConfig(Section):
    """When the trainer saves and what it keeps."""

    every_steps: PositiveInt = 20
    """Steps between two checkpoints; the last step always has one."""
    keep_last: PositiveInt = 2
    """Newest checkpoints that are kept."""


class SavedStepsConfig(Section):
    """Batches of steps, kept in `saved_steps/` of the run directory for `concord replay`: those of steps that were not
    applied, and if asked for of others."""

    keep: PositiveInt = 4
    """Newest ones that are kept, with the published weights that each started from, where later tries at a version make
    room before the first; of steps that were applied, as many again."""
    searched: bool = False
    """Keep the batches of steps, too, whose gradient was searched and that were applied all the same: observed, masked,
    or without a culprit. Each holds on to the published weights that it started from."""


class TrainerConfig(Section):
    """FSDP2 ranks and how they compute."""

    type: Literal["fsdp", "scripted"] = "fsdp"
    """`scripted` trains nothing and takes `scripted_step_s`: for tests and benchmarks of the loop."""
    ranks: PositiveInt = 1
    """Trainer ranks, an actor each; the model is sharded over them. Up to rounding, the result does not depend on their
    number."""
    num_cpus: NonNegativeFloat = 1.0
    """Ray CPUs a rank."""
    num_gpus: NonNegativeFloat = 0.0
    """Ray GPUs a rank; 0 trains on CPU."""
    threads: PositiveInt = 1
    """Compute threads a rank, on CPU."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and reductions are float32."""
    micro_batch_tokens: PositiveInt = 16384
    """Rows x longest row of one micro-batch, at most (one longer row makes its own)."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits exist at once."""
    activation_checkpointing: bool = False
    """Keep only each block's inputs for backward, and compute the rest again."""
    replay_routing: bool = False
    """In a mixture of experts, forward and backward use the experts that the engine chose, where it returned them (R3).
    Gates come from the trainer's own router logits, and load-balance statistics stay on its own choice."""
    algorithm: AlgorithmConfig = GrpoConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    gradloc: GradLocConfig = GradLocConfig()
    probes: ProbesConfig = ProbesConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    saved_steps: SavedStepsConfig = SavedStepsConfig()
    scripted_step_s: NonNegativeFloat = 0.0
    """Seconds of one step of the scripted trainer."""

    @model_validator(mode="after")
    def _scripted_trains_nothing(self) -> Self:
        if self.scripted_step_s and self.type != "scripted":
            raise ValueError(
                'got trainer.scripted_step_s with trainer.type = "fsdp"; set trainer.type = "scripted" or leave it out'
            )
        if self.replay_routing and self.type == "scripted":
            raise ValueError(
                'got trainer.replay_routing = true with trainer.type = "scripted", which has no forward pass; set'
                ' trainer.type = "fsdp"'
            )
        asked = [f"probes.{name}" for name, on in self.probes if on] + [
            "optimizer.qk_clip.enabled"
        ] * self.optimizer.qk_clip.enabled
        if asked and self.type == "scripted":
            raise ValueError(
                f'got trainer.{asked[0]} = true with trainer.type = "scripted", which has no model; set trainer.type ='
                ' "fsdp" or leave it out'
            )
        return self


class WeightsConfig(Section):
    """How new weights reach the engines."""

    transport: Literal["disk", "nccl", "ipc"] = "disk"
    """How the bytes travel; `nccl` and `ipc` are for vLLM on GPUs."""
    shard_bytes: PositiveInt = 512 * 1024 * 1024
    """Published files hold at most this much, so that no more is ever gathered at once."""
    straggler_s: PositiveFloat = 30.0
    """A replica that has not taken over a new version after this long is a straggler: the version is committed without
    it, and it gets no work until it has caught up. Not with a GPU transport, in which all replicas take part, and not
    in deterministic mode."""
    quorum: PositiveInt = 1
    """Replicas that must have taken over a version before it is committed without its stragglers."""
    canary_floor_nats: PositiveFloat = 1e-5
    """The canary's tolerance is 3 x max(gap at start, this): mean |log-prob difference|."""
    canary_ceiling_nats: PositiveFloat = 0.05
    """A replica whose gap at start is above this has loaded other weights than the trainer's."""
