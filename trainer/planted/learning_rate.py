"""A planted learning rate: that of the config, multiplied from the fault's start version on."""

from functools import partial

from rollout.faults.config import FaultsConfig
from rollout.faults.data_config import HighLearningRateFault
from rollout.faults.trainer_config import LostUpdateFault
from trainer.config.trainer import OptimizerConfig
from trainer.optim.optimizer import LearningRate, learning_rate


def planted_rate(faults: FaultsConfig, config: OptimizerConfig, total_steps: int) -> LearningRate:
    """The learning rate of a run; without `high_lr` and `lost_update` it is as it should be. Of several such faults the
    last one acts."""
    usual = partial(learning_rate, config, total_steps)
    for fault in reversed(faults.plant):
        if isinstance(fault, LostUpdateFault):
            lost = fault.start_version
            return lambda step: 0.0 if step >= lost else usual(step)
        if isinstance(fault, HighLearningRateFault):
            raised = config.model_copy(update={"learning_rate": fault.factor * config.learning_rate})
            hot, start = partial(learning_rate, raised, total_steps), fault.start_version
            return lambda step: hot(step) if step >= start else usual(step)
    return usual
