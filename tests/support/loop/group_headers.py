"""Headers of finished groups, by what a test says of them."""

from rollout.types.trajectory import FinishReason, GroupHeader, TrajectoryHeader
from rollout.types.weights import PolicyVersion

V0 = PolicyVersion(1, 0)


def header(dispatch_id: str, *, policy: PolicyVersion = V0, replica: int = 0, incarnation: int = 1) -> GroupHeader:
    """A group of one trajectory of four tokens under one policy."""
    trajectory = TrajectoryHeader(
        trajectory_id=f"{dispatch_id}-0",
        num_tokens=8,
        num_sampled=4,
        tokens_by_policy=((policy, 4),),
        reward=1.0,
        finish_reason=FinishReason.STOP,
    )
    return GroupHeader(
        dispatch_id=dispatch_id,
        prompt_id="p",
        pass_index=0,
        replica=replica,
        trajectories=(trajectory,),
        generation_s=0.1,
        reward_s=0.0,
        num_bytes=100,
        incarnation=incarnation,
    )
