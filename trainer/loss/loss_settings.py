"""What a run adds to the loss of `trainer.algorithm`. Torch-free."""

from dataclasses import dataclass, field

from rollout.faults.config import FaultsConfig
from trainer.config.consistency import CorrectionConfig, NoCorrection


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Without anything, importance weights are 1 and no fault is planted."""

    correction: CorrectionConfig = field(default_factory=NoCorrection)
    """Importance weights."""
    faults: FaultsConfig = field(default_factory=FaultsConfig)
    """Faults planted in the run; those in gradients act on the trainer."""

    @property
    def corrects(self) -> bool:
        """Whether the loss compares log-probs with the rollout's."""
        return not isinstance(self.correction, NoCorrection)
