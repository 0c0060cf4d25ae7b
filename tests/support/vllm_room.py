"""A real vLLM engine in an event loop of its own thread, so that a module of plain test functions can share one; and
the models that it serves."""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from support.builders import build_trajectory
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rollout.config import SamplingConfig, VllmConfig
from rollout.engines.vllm.engine import VllmEngine
from rollout.episodes.sample import GrowingSample
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.trajectory import Trajectory
from rollout.types.weights import Canary, PolicyVersion, Transport, WeightManifest
from trainer.consistency.scoring.held_versions import HeldVersions
from trainer.consistency.scoring.protocols import ScoreOptions
from trainer.consistency.scoring.scorer import Scorer

T = TypeVar("T")
VOCAB = 48
CONTEXT = 512
EOS = 1
DEADLINE_S = 60.0
EXACT_NATS = 5e-6
"""Mean |log-prob difference| of fp32 vLLM and a plain fp32 forward; a missing parameter makes it 1e-3 and more."""


def save_model(directory: Path, seed: int, *, tied: bool = True, moe: bool = False) -> PreTrainedModel:
    """A small Qwen3 with every parameter random, the norms included, in Hugging Face layout."""
    shape: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": tied,
        "eos_token_id": EOS,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    experts: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    }
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts)) if moe else Qwen3ForCausalLM(Qwen3Config(**shape))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(
                mean=1.0 if "norm" in name else 0.0, std=0.2 if parameter.ndim == 1 else 0.15, generator=generator
            )
    model.save_pretrained(directory, safe_serialization=True)
    return model.eval()


def build_manifest(directory: Path, policy: PolicyVersion) -> WeightManifest:
    entries = digest_directory(directory)
    canary = Canary(token_ids=np.arange(2, 10, dtype=np.int32), logprobs=np.zeros(7, dtype=np.float32))
    return WeightManifest(
        policy=policy,
        transport=Transport.DISK,
        location=str(directory),
        tensors=entries,
        digest=manifest_digest(entries),
        canary=canary,
        num_bytes=1,
    )


def forward(directory: Path, token_ids: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """[T - 1] log-probs of a plain fp32 forward with the weights of a directory."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([list(token_ids)])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1] / temperature, dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].numpy()


def ask(
    name: str,
    prompt: Sequence[int],
    num_samples: int = 1,
    new_tokens: int = 16,
    seeds: tuple[int, ...] = (),
    sampling: SamplingParams | None = None,
) -> GenerationRequest:
    """A request that samples `new_tokens` tokens whatever they are, unless `sampling` says otherwise."""
    params = sampling or SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    ids = np.array(prompt, dtype=np.int32)
    return GenerationRequest(
        request_id=name, prompt_ids=ids, num_samples=num_samples, sampling=params, eos_ids=(EOS,), seeds=seeds
    )


def assert_each_tensor_counts(old: Path, new: Path, ids: Sequence[int]) -> None:
    """Each tensor alone moves the log-probs far more than the tolerance: whoever passes a comparison with `new` has
    them all."""
    whole, tensors, before = (
        forward(new, ids),
        load_file(new / "model.safetensors"),
        load_file(old / "model.safetensors"),
    )
    mixed = new.parent / f"{new.name}-mixed"
    mixed.mkdir(exist_ok=True)
    (mixed / "config.json").write_bytes((new / "config.json").read_bytes())
    for name in tensors:
        save_file(tensors | {name: before[name]}, mixed / "model.safetensors", metadata={"format": "pt"})
        assert np.abs(forward(mixed, ids) - whole).mean() > 20 * EXACT_NATS, name


def tokens_of(chunks: Sequence[TokenChunk], sample: int = 0) -> list[int]:
    return [int(token) for chunk in chunks if chunk.sample_index == sample for token in chunk.token_ids]


def gap(
    chunks: Sequence[TokenChunk], prompt: Sequence[int], models: dict[PolicyVersion, Path], sample: int = 0
) -> float:
    """Mean |difference| between the log-probs of a sample and a forward of each of its chunks under the weights that
    its label names."""
    ids, position, differences = [*prompt, *tokens_of(chunks, sample)], len(prompt), list[NDArray[np.float32]]()
    for chunk in [chunk for chunk in chunks if chunk.sample_index == sample]:
        expected = forward(models[chunk.policy], ids)[position - 1 : position - 1 + chunk.token_ids.size]
        differences.append(np.abs(expected - chunk.logprobs))
        position += chunk.token_ids.size
    return float(np.concatenate(differences).mean())


def trajectories_of(request: GenerationRequest, chunks: Sequence[TokenChunk]) -> list[Trajectory]:
    """The samples of a request, one span each, under a tag that declares the request's sampling."""
    trajectories: list[Trajectory] = []
    for index in range(request.num_samples):
        sample = GrowingSample(request.prompt_ids)
        own = [chunk for chunk in chunks if chunk.sample_index == index]
        for chunk in own:
            sample.add(chunk, request, 0)
        params, num_sampled = request.sampling, sample.length - request.prompt_ids.size
        one = build_trajectory(prompt_tokens=request.prompt_ids.size, spans=((own[0].policy, num_sampled),))
        cut = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
        trajectories.append(
            replace(
                one,
                token_ids=sample.token_ids(),
                rollout_logprobs=sample.logprobs(),
                supports=sample.supports(),
                tag=replace(one.tag, lists_supports=True, **cut),
            )
        )
    return trajectories


def scores_of(directory: Path, trajectory: Trajectory) -> NDArray[np.float32]:
    """[T] by the consistency service's scorer, under the weights of a directory."""
    cpu = torch.device("cpu")
    versions = HeldVersions(directory, directory, "float32", 64, max_versions=1, device=cpu)
    return Scorer(versions, 1000).score([trajectory], ScoreOptions())[0]


class VllmRoom:
    """One started engine; `run` executes a coroutine in its loop and waits for the answer."""

    def __init__(self, manifest: WeightManifest, config: VllmConfig, start_deadline_s: float = 240.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-room", daemon=True)
        self._thread.start()
        identity = EngineIdentity(replica=0, seed=7, deterministic=False, sampling=SamplingConfig())
        self.engine = VllmEngine(config, identity)
        try:
            self.tag = self.run(self.engine.start(manifest), start_deadline_s)
        except BaseException:
            self.close()
            raise

    def run(self, coroutine: Coroutine[Any, Any, T], deadline_s: float = DEADLINE_S) -> T:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(coroutine, deadline_s), self._loop).result(
            deadline_s + 10.0
        )

    def collect(self, request: GenerationRequest) -> list[TokenChunk]:
        return self.run(self.gather(request))

    async def gather(self, request: GenerationRequest) -> list[TokenChunk]:
        return [chunk async for chunk in self.engine.generate(request)]

    @property
    def core_pid(self) -> int:
        core = self.engine._core
        assert core is not None
        return core.process.pid

    def close(self) -> None:
        self.run(self.engine.stop(), 60.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()
