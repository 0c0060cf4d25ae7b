"""Groups that a real torch engine samples under truncation, for trainers and scorers of the same weights."""

from pathlib import Path

import numpy as np
from support.builders import build_dispatch
from support.trainer.torch_models import by_sample, manifest_of, request_of, run_dry

from rollout.config import SamplingConfig, TorchEngineConfig
from rollout.engines.torch.core import DecodeCore
from rollout.episodes.sample import GrowingSample
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import SamplingParams
from rollout.types.trajectory import FinishReason, Reward, Timings, Trajectory, TrajectoryGroup

PROMPTS = ([3, 4, 12, 5, 6], [7, 2, 12], [9, 9, 10, 11, 12, 13, 14])
GROUP_SIZE = 4
TOKENS = 12


def sampled_groups(model_dir: Path, sampling: SamplingConfig, *, lists: bool = True) -> list[TrajectoryGroup]:
    """One group a prompt, of version 0; with `lists` False the engine's lists are taken away."""
    identity = EngineIdentity(replica=0, seed=7, deterministic=False, sampling=sampling)
    core = DecodeCore(TorchEngineConfig(), identity, manifest_of(model_dir, 0))
    tag = identity.tag("torch", "0", dtype="float32", kv_across_versions="recompute", weights_digest=core.digest)
    params = SamplingParams(
        max_new_tokens=TOKENS,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        ignore_eos=True,
    )
    groups: list[TrajectoryGroup] = []
    for number, prompt in enumerate(PROMPTS):
        request = request_of(f"d-{number}:0", prompt, seeds=tuple(range(1, GROUP_SIZE + 1)), sampling=params)
        core.submit(request)
        done, dispatch = by_sample(run_dry(core)), build_dispatch(number, group_size=GROUP_SIZE)
        trajectories: list[Trajectory] = []
        for index in range(GROUP_SIZE):
            sample = GrowingSample(np.array(prompt, dtype=np.int32))
            for chunk in done[request.request_id, index]:
                sample.add(chunk, request, 0)
            trajectories.append(
                Trajectory(
                    trajectory_id=f"{dispatch.dispatch_id}-{index}",
                    dispatch_id=dispatch.dispatch_id,
                    prompt_id=dispatch.prompt.prompt_id,
                    environment="arithmetic",
                    token_ids=sample.token_ids(),
                    sampled=sample.sampled_mask(),
                    rollout_logprobs=sample.logprobs(),
                    version_spans=sample.spans(),
                    turns=1,
                    tag=tag,
                    finish_reason=FinishReason.LENGTH,
                    timings=Timings(started_at_s=0.0, generation_s=0.0),
                    supports=sample.supports() if lists else None,
                )
            )
        groups.append(
            TrajectoryGroup(
                dispatch_id=dispatch.dispatch_id,
                prompt_id=dispatch.prompt.prompt_id,
                pass_index=0,
                environment="arithmetic",
                trajectories=tuple(trajectories),
                rewards=tuple(Reward(total=float(index % 2)) for index in range(GROUP_SIZE)),
            )
        )
    return groups
