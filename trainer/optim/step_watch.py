"""What is measured, and clipped, around the passes and the update of a step: probes of blocks and QK-Clip. Layer 3 of
diagnosis. It knows no gradient."""

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager

from trainer.config.trainer import TrainerConfig
from trainer.model.blocks import Block
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks
from trainer.optim.probes import Probed, Probes
from trainer.optim.qk_clip import QkClip
from trainer.types.step import MicroBatch

HeadLogits = tuple[tuple[str, tuple[float, ...]], ...]
"""(block, largest attention logit of each head)"""


class StepWatch:
    """One rank's part; what the config leaves off costs nothing."""

    def __init__(self, config: TrainerConfig, model: PolicyModel, blocks: Sequence[Block], ranks: Ranks) -> None:
        """Find what there is to watch.

        Raises:
            UserError: the model has nothing of the kind that the config asks for, or QK-Clip is void on it.
        """
        self._probes = Probes(config.probes, model, blocks, ranks)
        qk_clip = config.optimizer.qk_clip
        self._clip = QkClip(model, qk_clip.threshold) if qk_clip.enabled else None

    @contextmanager
    def forward(self, micro: MicroBatch) -> Generator[None]:
        """The forward pass of a micro-batch of the step runs inside, its backward pass outside."""
        with self._probes.recording(micro):
            if self._clip is None:
                yield
                return
            # The last token of a row predicts nothing; the model reads it only where a longer row stands beside.
            with self._clip.recording([length - 1 for length in micro.lengths]):
                yield

    def updating(self) -> AbstractContextManager[None]:
        """The update runs inside, and `clip_heads` at its end."""
        return self._probes.updating()

    def clip_heads(self, *, applied: bool) -> HeadLogits:
        """Scale heads down by what the step's passes showed, if its update was applied. Collective."""
        if self._clip is None:
            return ()
        if not applied:
            self._clip.forget()
            return ()
        return tuple(self._clip.apply().items())

    def take(self) -> tuple[Probed, ...]:
        """What the probes saw. Collective."""
        return self._probes.take()
