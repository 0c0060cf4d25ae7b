"""From a config of the algorithm union to its implementation: the only place that names them all."""

from trainer.algorithms.grpo import Grpo
from trainer.algorithms.gspo import Gspo
from trainer.algorithms.rloo import Rloo
from trainer.config.trainer import AlgorithmConfig, GrpoConfig, GspoConfig, RlooConfig
from trainer.types.protocols import Algorithm


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that `config` names."""
    match config:
        case GrpoConfig():
            return Grpo(config)
        case RlooConfig():
            return Rloo(config)
        case GspoConfig():
            return Gspo(config)
