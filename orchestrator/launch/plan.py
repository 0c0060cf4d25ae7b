"""The resource plan: what a config will start, before anything is started."""

from dataclasses import dataclass

from orchestrator.config import RunConfig


@dataclass(frozen=True, slots=True)
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
    own = f"{trainer.type}, {trainer.dtype}, {trainer.algorithm.type}"
    kept = f"{config.store.type}, durability {config.store.durability}"
    rows = (
        ("engine", engine.replicas, engine.num_cpus, engine.num_gpus, f"{engine.type}, {engine.dtype}"),
        ("trainer", trainer.ranks, trainer.num_cpus, trainer.num_gpus, own),
        ("episodes", config.episodes.workers, small, 0, f"up to {config.max_concurrent_groups} groups at once"),
        ("reward", config.reward_workers.workers, small, 0, config.reward.type),
        ("store", 1, small, 0, kept),
        ("evaluation", int(every > 0), small, 0, f"every {every} steps"),
    )
    plan = [Share(*row) for row in rows if row[1]]
    if consistency.mode != "off":
        note = f"mode {consistency.mode}"
        plan.append(Share("consistency", consistency.workers, consistency.num_cpus, consistency.num_gpus, note))
    return plan


def totals(plan: list[Share]) -> tuple[float, float]:
    """(CPUs, GPUs) of the whole plan."""
    return sum(s.count * s.cpus for s in plan), sum(s.count * s.gpus for s in plan)
