"""Small random models on disk, their manifests, and the library's plain forward pass as the reference, for tests of the
torch engine."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from rollout.config import SamplingConfig, TorchEngineConfig
from rollout.engines.torch.core import DecodeCore, SampleDone
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, SamplingParams, TokenChunk
from rollout.types.weights import Canary, PolicyVersion, Transport, WeightManifest
from trainer.config.trainer import TinyModelConfig
from trainer.tiny.model import tiny_architecture


def save_random_model(directory: Path, seed: int, *, moe: bool = False, tied: bool = True) -> Path:
    """A random tiny model in Hugging Face format."""
    torch.manual_seed(seed)
    model = tiny_architecture(TinyModelConfig(moe=moe, tie_embeddings=tied))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)  # far from uniform, so that wrong weights, masks or positions show
    model.save_pretrained(directory)
    return directory


def manifest_of(directory: Path, version: int) -> WeightManifest:
    """What a trainer would publish about a directory."""
    tensors = digest_directory(directory)
    canary = Canary(token_ids=np.array([3, 4, 5], dtype=np.int32), logprobs=np.array([-1.0, -2.0], dtype=np.float32))
    return WeightManifest(
        policy=PolicyVersion(1, version),
        transport=Transport.DISK,
        location=str(directory),
        tensors=tensors,
        digest=manifest_digest(tensors),
        canary=canary,
        num_bytes=sum(file.stat().st_size for file in directory.glob("*.safetensors")),
    )


def identity_of(*, deterministic: bool = False) -> EngineIdentity:
    return EngineIdentity(replica=0, seed=7, deterministic=deterministic, sampling=SamplingConfig())


def core_of(directory: Path, *, deterministic: bool = False, **config: object) -> DecodeCore:
    """A core that serves `directory` as version 0."""
    return DecodeCore(
        TorchEngineConfig.model_validate(config), identity_of(deterministic=deterministic), manifest_of(directory, 0)
    )


def request_of(
    request_id: str,
    prompt: list[int],
    seeds: tuple[int, ...] = (1, 2),
    eos_ids: tuple[int, ...] = (1,),
    sampling: SamplingParams | None = None,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_ids=np.array(prompt, dtype=np.int32),
        num_samples=len(seeds),
        sampling=sampling or SamplingParams(max_new_tokens=12),
        eos_ids=eos_ids,
        seeds=seeds,
    )


def run_dry(core: DecodeCore) -> list[SampleDone]:
    """Step until nothing is left to do."""
    done: list[SampleDone] = []
    for _ in range(500):
        if not core.can_step:
            return done
        done += core.step()
    raise AssertionError("the core still has work after 500 steps")


def by_sample(done: list[SampleDone]) -> dict[tuple[str, int], list[TokenChunk]]:
    return {(sample.request_id, sample.chunks[0].sample_index): sample.chunks for sample in done}


def tokens_of(chunks: list[TokenChunk]) -> NDArray[np.int32]:
    return np.concatenate([chunk.token_ids for chunk in chunks])


def logprobs_of(chunks: list[TokenChunk]) -> NDArray[np.float32]:
    return np.concatenate([chunk.logprobs for chunk in chunks])


class Reference:
    """The library's own model, run over whole sequences."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, prompt: list[int], tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """[n] raw log-probs of `tokens` behind `prompt`."""
        ids = torch.tensor([prompt + tokens.tolist()])
        with torch.no_grad():
            logprobs = torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[0].float(), -1)
        return logprobs[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None]).squeeze(1).numpy()
