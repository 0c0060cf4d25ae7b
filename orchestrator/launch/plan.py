"""The resource plan: what a config will start, before anything is started."""

from dataclasses import dataclass

from orchestrator.config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One kind of actor."""

    role: str
    count: int
    cpus: float
    gpus: float
    note: str


def resource_plan(config: RunConfig) -> list[Share]:
    """One row a kind of actor."""
    small, engine, trainer = config.cluster.small_actor_cpus, config.engine, config.trainer
    consistency, every = config.consistency, config.evaluation.every_steps
    service = Share(
        role="consistency",
        count=consistency.workers,
        cpus=consistency.num_cpus,
        gpus=consistency.num_gpus,
        note=f"mode {consistency.mode}",
    )
    return [
        Share(
            role="engine",
            count=engine.replicas,
            cpus=engine.num_cpus,
            gpus=engine.num_gpus,
            note=f"{engine.type}, {engine.dtype}",
        ),
        Share(
            role="trainer",
            count=trainer.ranks,
            cpus=trainer.num_cpus,
            gpus=trainer.num_gpus,
            note=f"{trainer.type}, {trainer.dtype}, {trainer.algorithm.type}",
        ),
        Share(
            role="episodes",
            count=config.episodes.workers,
            cpus=small,
            gpus=0,
            note=f"up to {config.max_concurrent_groups} groups at once",
        ),
        Share(role="reward", count=config.reward_workers.workers, cpus=small, gpus=0, note=config.reward.type),
        Share(
            role="store", count=1, cpus=small, gpus=0, note=f"{config.store.type}, durability {config.store.durability}"
        ),
        *((Share(role="evaluation", count=1, cpus=small, gpus=0, note=f"every {every} steps"),) if every else ()),
        *(() if consistency.mode == "off" else (service,)),
    ]


def totals(plan: list[Share]) -> tuple[float, float]:
    """(CPUs, GPUs) of the whole plan."""
    return sum(s.count * s.cpus for s in plan), sum(s.count * s.gpus for s in plan)
