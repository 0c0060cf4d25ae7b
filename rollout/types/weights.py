"""Names of policies and what an engine needs to take over new weights."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from rollout.types.wire import wired


@wired
@dataclass(frozen=True, slots=True, order=True)
class PolicyVersion:
    """The name of a policy. Version 0 is the base model; v is the weights after optimizer step v."""

    trainer_epoch: int
    """One more at every trainer start, from 1 (0 is nobody)."""
    version: int

    def __post_init__(self) -> None:
        if self.trainer_epoch < 1 or self.version < 0:
            raise ValueError(
                f"got policy (epoch {self.trainer_epoch}, version {self.version}); epochs start at 1 and versions at 0:"
                " an unknown version is an error, never a default"
            )

    @property
    def key(self) -> str:
        """`eE-vN`, the name of this policy in paths, labels and events."""
        return f"e{self.trainer_epoch}-v{self.version}"

    @classmethod
    def parse(cls, key: str) -> "PolicyVersion":
        """The inverse of `key`.

        Raises:
            ValueError: `key` does not read `eE-vN`.
        """
        epoch, dash, version = key.partition("-")
        if not (
            dash and epoch.startswith("e") and version.startswith("v") and epoch[1:].isdigit() and version[1:].isdigit()
        ):
            raise ValueError(f"got policy key {key!r}; expected the form e1-v0")
        return cls(int(epoch[1:]), int(version[1:]))


class Transport(StrEnum):
    """How the bytes of new weights reach an engine."""

    DISK = "disk"
    """safetensors files in the run directory."""
    NCCL = "nccl"
    """NCCL broadcast between trainer and engine GPUs, through vLLM's weight-transfer engine."""
    IPC = "ipc"
    """CUDA IPC handles between processes that share a GPU, through vLLM's weight-transfer engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One published tensor. `sha256` is over its raw little-endian bytes in row-major order."""

    name: str
    dtype: str
    """safetensors name of the dtype: F32, BF16, F16, I64, ..."""
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Canary:
    """A fixed prompt and the trainer's own log-probs of it under the published weights."""

    token_ids: NDArray[np.int32]
    """[C]"""
    logprobs: NDArray[np.float32]
    """[C - 1], nats, raw (temperature 1): entry p is the log-prob of token p + 1."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.logprobs.shape != (self.token_ids.size - 1,):
            raise ValueError(
                f"canary has {self.token_ids.shape} ids and {self.logprobs.shape} log-probs; expected [C] and [C - 1]"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightManifest:
    """What the trainer published under one policy version."""

    policy: PolicyVersion
    transport: Transport
    location: str
    """disk: a directory in Hugging Face layout; nccl and ipc: the rendezvous of the transfer."""
    tensors: tuple[TensorEntry, ...]
    """Sorted by name; for nccl and ipc, in the order in which they are sent. With a tied head, the head is not among
    them."""
    digest: str
    """`rollout.published.digests.manifest_digest(tensors)`."""
    canary: Canary
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyReport:
    """An engine's answer to a manifest."""

    policy: PolicyVersion
    digest: str
    """Digest over the tensor bytes that the engine itself received."""
    pause_s: float
    """From the moment sampling stopped to the moment it could go on."""
    interrupted: int
    """Requests that were running and go on under the new weights."""
