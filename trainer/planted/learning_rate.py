"""A planted learning rate: an optimizer that steps farther than its config says, and reports the rate that it used."""

from collections.abc import Sequence

from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import HighLearningRateFault
from trainer.config.trainer import OptimizerConfig
from trainer.model.blocks import Block
from trainer.model.ranks import Ranks
from trainer.optim.optimizer import GradientNorms, OptimizerReport, PolicyOptimizer


class HotOptimizer(PolicyOptimizer):
    """Multiplies the learning rate from the fault's start version on."""

    def __init__(
        self,
        blocks: Sequence[Block],
        config: OptimizerConfig,
        ranks: Ranks,
        total_steps: int,
        fault: HighLearningRateFault,
    ) -> None:
        super().__init__(blocks, config, ranks, total_steps)
        self._asked, self._fault = config, fault

    def apply(self, step: int, norms: GradientNorms) -> OptimizerReport:
        """As the base, at the multiplied rate."""
        hot = {"learning_rate": self._fault.factor * self._asked.learning_rate}
        self._config = self._asked.model_copy(update=hot) if step >= self._fault.start_version else self._asked
        return super().apply(step, norms)


def planted_optimizer(
    faults: FaultsConfig, blocks: Sequence[Block], config: OptimizerConfig, ranks: Ranks, total_steps: int
) -> PolicyOptimizer:
    """The optimizer of a run; without `high_lr` it is as it should be. Of several such faults the last one acts."""
    for fault in reversed(faults.plant):
        if isinstance(fault, HighLearningRateFault):
            return HotOptimizer(blocks, config, ranks, total_steps, fault)
    return PolicyOptimizer(blocks, config, ranks, total_steps)
