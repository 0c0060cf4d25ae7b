"""vLLM's scheduler with one place kept free for a score. It runs inside the engine core and knows neither weights nor
versions.

vLLM admits by priority but only when a place in the batch is free: with the batch full of long samples a canary would
wait for the first of them to end. The batch is therefore built one larger than the number of samples, and the last
place opens to a canary only.
"""

from vllm.config import SchedulerConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler


def places(config: SchedulerConfig, waiting: RequestQueue) -> int:
    """Requests that may run now: all places if the next one is a canary (priority below 0), else all but one."""
    canary = bool(waiting) and waiting.peek_request().priority < 0
    return config.max_num_seqs if canary else config.max_num_seqs - 1


class CanaryScheduler(Scheduler):
    """The scheduler for steps that end before the next one is planned (CPU)."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.max_num_active_reqs = places(self.scheduler_config, self.waiting)
        return super().schedule(throttle_prefills)


class AsyncCanaryScheduler(AsyncScheduler):
    """The scheduler for steps that are planned while the one before still runs (GPU)."""

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.max_num_active_reqs = places(self.scheduler_config, self.waiting)
        return super().schedule(throttle_prefills)
