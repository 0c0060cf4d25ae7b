"""Config of the rollout room: environments, rewards, evaluation, sampling, engines, store. Torch-free; frozen; unknown
keys are errors."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator


class Section(BaseModel):
    """Base of every config model of every room."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ArithmeticConfig(Section):
    """Procedural two-operand addition; the policy answers with the sum's digits in reverse, then the end token."""

    type: Literal["arithmetic"] = "arithmetic"
    digits: PositiveInt = 2
    """Digits of each operand, zero-padded."""
    prompts: PositiveInt = 6400
    """Prompts in one pass."""
    turns: PositiveInt = 1
    """Sums asked one after the other in one episode, each once the policy has ended its answer; the reference answer is
    all of theirs joined."""

    @model_validator(mode="after")
    def _has_a_sum_for_every_turn(self) -> Self:
        if self.turns > self.prompts:
            raise ValueError(
                f"got turns = {self.turns} with prompts = {self.prompts}, so a sum would come twice in one episode; "
                "raise prompts or lower turns"
            )
        return self


class JsonlConfig(Section):
    """Prompts from a `.jsonl` or `.parquet` file with columns `prompt` or `messages`, `answer`, and any others."""

    type: Literal["jsonl"] = "jsonl"
    path: Path
    """The file; relative to the working directory."""
    shuffle: bool = True
    """Seeded by `run.seed` and the pass; False keeps the order of the file."""
    prompt_key: str = "prompt"
    """Column with a raw prompt: a string."""
    messages_key: str = "messages"
    """Column with a chat: a list of `{role, content}`."""
    answer_key: str = "answer"
    """Column with the reference answer: a string or a number."""
    id_key: str = "id"
    """Column that names a prompt; where it is absent, the row number does."""
    system_prompt: str | None = None
    """Put before `messages`; refused for raw prompts."""
    apply_chat_template: bool = True
    """A raw prompt becomes one user message where the tokenizer has a chat template; False encodes it as it is.
    `messages` always go through the template."""


EnvironmentConfig = Annotated[ArithmeticConfig | JsonlConfig, Field(discriminator="type")]


class ExactMatchConfig(Section):
    """1 when the completion equals the answer and ended with the end token, else 0."""

    type: Literal["exact_match"] = "exact_match"
    strip: bool = True
    """Compare without surrounding white space."""


class MathVerifyConfig(Section):
    """1 when `math-verify` finds the completion equivalent to the answer, else 0."""

    type: Literal["math_verify"] = "math_verify"


class PythonRewardConfig(Section):
    """Your own function: `package.module:function` with the signature of `rollout.types.protocols.RewardFunction`."""

    type: Literal["python"] = "python"
    function: str
    """`package.module:function`; the module must be importable in the reward workers."""


class RewardWorkersConfig(Section):
    """The pool of reward workers."""

    workers: PositiveInt = 1
    """Reward workers in all; each judges one group at a time."""
    deadline_s: PositiveFloat = 10.0
    """Deadline for one group; a reward that takes longer is `failed(reward_timeout)` and its worker is replaced."""


RewardConfig = Annotated[ExactMatchConfig | MathVerifyConfig | PythonRewardConfig, Field(discriminator="type")]


class EvaluationConfig(Section):
    """Periodic independent evaluation on held-out prompts. Environment, chat template, system prompt and reward are the
    run's; the sampling is its own."""

    every_steps: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations, version 0 and the last one included; 0 is off."""
    prompts: PositiveInt = 64
    """Held-out prompts. Arithmetic holds out other sums than those of the run, by its seed; `jsonl` takes so many of
    `path`, or all where it has fewer."""
    path: Path | None = None
    """With environment.type = "jsonl": the file of held-out prompts, with the columns of the environment's."""
    samples: PositiveInt = 1
    """Samples for each prompt."""
    max_new_tokens: PositiveInt | None = None
    """Most tokens of one turn; None takes sampling.max_new_tokens."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 1
    """Sample from the k likeliest tokens: 1 is greedy, 0 is off."""
    max_overlap: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Largest share of held-out prompts that may also be training prompts (exactly, or by a run of 13 words); above it
    the run does not start."""
    deadline_s: PositiveFloat = 300.0
    """Deadline for one evaluation; past it there is no score, and an event says so."""


class SamplingConfig(Section):
    """How the policy samples in training."""

    max_new_tokens: PositiveInt = 8
    """Most tokens that are sampled in one turn."""
    temperature: PositiveFloat = 1.0
    """Logits are divided by it; log-probs are those after it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from the k likeliest tokens; 0 is off."""
    ignore_eos: bool = False
    """Sample `max_new_tokens` tokens whatever they are, for fixed work."""


class EngineSection(Section):
    """What every engine has."""

    replicas: PositiveInt = 1
    """Engine replicas, an actor each."""
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    """Ray CPUs a replica."""
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    """Ray GPUs a replica; 0 runs it on CPU."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Number format of weights and KV cache."""
    kv_across_versions: Literal["recompute", "keep"] = "recompute"
    """At a weight update, running requests keep their tokens; `recompute` rebuilds their KV under the new weights,
    `keep` goes on with the KV that older weights wrote, which no recomputation can reproduce."""
    max_model_len: PositiveInt | None = None
    """Context in tokens; None takes the model's own."""


class VllmConfig(EngineSection):
    """vLLM's AsyncLLM."""

    type: Literal["vllm"] = "vllm"
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache on CPU; on GPU `gpu_memory_utilization` decides."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.85
    """Share of a GPU's memory that the replica takes."""
    tensor_parallel_size: PositiveInt = 1
    """Devices that one replica is spread over."""
    max_num_seqs: PositiveInt = 128
    """Samples decoded at once; more wait."""
    enforce_eager: bool = False
    """Neither compile nor capture graphs: starts sooner, runs slower."""
    cpu_bind_from: Annotated[int, Field(ge=0)] | None = 0
    """On CPU, replica i computes on core `cpu_bind_from + i`; None leaves it to vLLM."""
    serve_metrics: bool = False
    """Keep vLLM's own metrics and serve them at `exporter.host` on a port of each replica; `.prometheus/RUN.json`
    says which. It costs generation CPU."""
    return_routing: bool = False
    """Return the MoE routing of every trajectory; on GPU only, with `kv_across_versions = "recompute"`."""

    @model_validator(mode="after")
    def _routing_needs_a_gpu_and_shared_prefixes(self) -> Self:
        if self.return_routing and not self.num_gpus:
            raise ValueError(
                "got engine.return_routing = true with engine.num_gpus = 0: vLLM returns routing from its second model"
                ' runner alone, which needs Triton and so a GPU; set engine.num_gpus, or engine.type = "torch", which'
                " returns it on CPU too"
            )
        if self.return_routing and self.kv_across_versions != "recompute":
            raise ValueError(
                'got engine.return_routing = true with engine.kv_across_versions = "keep": vLLM returns routing only'
                ' where it shares prefixes, which is off under keep; set engine.kv_across_versions = "recompute"'
            )
        return self


class TorchEngineConfig(EngineSection):
    """The in-process reference engine."""

    type: Literal["torch"] = "torch"
    max_num_seqs: PositiveInt = 128
    """Samples decoded at once; more wait."""
    threads: PositiveInt = 1
    """Compute threads a replica."""
    return_routing: bool = False
    """Return the MoE routing of every trajectory."""


class ScriptedConfig(EngineSection):
    """A seeded fake: it waits a drawn latency and returns drawn tokens. For tests and benchmarks."""

    type: Literal["scripted"] = "scripted"
    slots: PositiveInt = 16
    """Samples that run at once; more wait in order."""
    latency_mean_s: Annotated[float, Field(ge=0)] = 0.0
    """Mean seconds a sample occupies a slot."""
    latency_sigma: Annotated[float, Field(ge=0)] = 0.0
    """Sigma of the log-normal latency; 0 makes all equal."""
    apply_s: Annotated[float, Field(ge=0)] = 0.0
    """Seconds that a weight update pauses the engine."""
    vocab_size: PositiveInt = 32
    """Token ids are drawn below this."""


EngineConfig = Annotated[VllmConfig | TorchEngineConfig | ScriptedConfig, Field(discriminator="type")]


def returns_routing(engine: EngineConfig) -> bool:
    """Whether replicas are asked for the experts of a mixture of experts."""
    return isinstance(engine, VllmConfig | TorchEngineConfig) and engine.return_routing


class SqliteStoreConfig(Section):
    """The trajectory store: a SQLite database in the run directory."""

    type: Literal["sqlite"] = "sqlite"
    durability: Literal["process", "machine"] = "process"
    """`process` survives kill -9; `machine` also survives power loss (one fsync a transaction)."""


StoreConfig = SqliteStoreConfig
"""The kinds of store; another one makes it a union, as `EngineConfig` is."""


class EpisodesConfig(Section):
    """The pool of episode workers."""

    workers: PositiveInt = 1
    """Episode workers, an actor each; all of them share the engine replicas."""
    deadline_s: PositiveFloat = 300.0
    """Deadline for one group, its rewards included; past it the dispatch is `failed(deadline)`."""
    max_attempts: PositiveInt = 3
    """Attempts at one prompt in one pass; then it is given up, with an event. Rejections for staleness and resumes do
    not count."""
    max_failures_in_a_row: PositiveInt | None = None
    """Dispatches that may fail in a row before the run ends with the reason. None takes 10 times the groups in
    generation at once, and 20 at least: with the pauses that grow between the attempts, about a minute in which
    nothing came back."""
    max_failure_share: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of failed ones among the dispatches whose episodes ended in the last `failure_window_s`, above which the
    run ends with the reason; 1 never ends it."""
    failure_window_s: PositiveFloat = 300.0
    """Seconds over which `max_failure_share` is taken; with fewer than 20 episodes in them nothing is decided."""
