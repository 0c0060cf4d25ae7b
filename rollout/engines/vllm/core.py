"""One running AsyncLLM with its engine-core process: every wait on it ends at once when the process dies, and `stop`
leaves no process.

It knows requests only as vLLM's parameters and weights only as remote calls by name.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil

from rollout.config import VllmConfig
from rollout.engines.vllm.launch import launch, root_cause
from rollout.engines.vllm.process import CoreProcess, descendants, end
from rollout.errors import EngineError, boundary
from rollout.tasks import unless
from rollout.types.engine_identity import EngineIdentity

if TYPE_CHECKING:
    from vllm.inputs.engine import TokensInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

T = TypeVar("T")
_PATIENCE_S = 5.0
"""How long a process may take to end before it is killed."""
_PATIENCE_ON_CPU_S = 0.5
"""There is no device to give back, and the core spends seconds on collecting garbage before it exits."""


class VllmCore:
    """See the module. Made by `VllmCore.start`."""

    def __init__(self, llm: "AsyncLLM", process: CoreProcess, scratch: Path, family: list[psutil.Process]) -> None:
        self.llm = llm
        self.process = process
        self._scratch, self._family = scratch, family

    @classmethod
    async def start(cls, model: str, config: VllmConfig, identity: EngineIdentity) -> Self:
        """Launch and connect. A start that fails or is cancelled leaves no process.

        Raises:
            UserError: model, config and machine do not fit together.
            EngineError: the core did not start.
        """
        scratch = Path(tempfile.mkdtemp(prefix="concord-vllm-"))
        before = {process.pid for process in descendants()}
        launching = asyncio.get_running_loop().run_in_executor(None, launch, model, config, identity, scratch)
        try:
            llm = await asyncio.shield(launching)
            core = cls(llm, CoreProcess(_core_pid(llm)), scratch, descendants(before))
            await core.rpc("concord_end_with", os.getpid())
            await core.rpc("concord_touch_cache")
        except BaseException:
            # A cancelled launch goes on in its thread until its child is gone.
            end(descendants(before), 0.0)
            await asyncio.wait({launching})
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return core

    async def call(self, what: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Await vLLM, or fail when the core has died.

        Raises:
            EngineError: the core died, or vLLM raised.
        """
        with boundary(EngineError, what):
            return await unless(self.process.died, coroutine, lambda: EngineError(f"{what}: {self.obituary()}"))

    async def rpc(self, method: str, *args: object) -> str:
        """Call a method of the worker extension on every worker; they must give the same answer.

        Raises:
            EngineError: the call failed, or two workers answered differently.
        """
        answers: list[str] = await self.call(f"vLLM worker, {method}", self.llm.collective_rpc(method, args=args))
        if any(answer != answers[0] for answer in answers):
            raise EngineError(f"vLLM worker, {method}: {len(answers)} workers answered differently: {answers}")
        return answers[0]

    async def complete(
        self, prompt: "TokensInput", params: "SamplingParams", key: str, priority: int
    ) -> "RequestOutput":
        """Run one request to its only, final output."""
        final: RequestOutput | None = None
        async for output in self.llm.generate(prompt, params, key, priority=priority):
            final = output
        if final is None:
            raise EngineError(f"request {key}: vLLM ended it without an output")
        return final

    async def pause(self, *, drain: bool, clear_cache: bool) -> None:
        """Stop stepping. `AsyncLLM.pause_generation` does the same call and then sleeps 20 ms, which would more than
        double the pause."""
        scheduler, mode = self.llm.engine_core, "wait" if drain else "keep"
        await self.call("pause", scheduler.pause_scheduler_async(mode=mode, clear_cache=clear_cache))

    async def resume(self) -> None:
        await self.call("resume", self.llm.resume_generation())

    async def abort(self, keys: Sequence[str]) -> None:
        await self.call("abort", self.llm.abort(list(keys)))

    @property
    def on_cpu(self) -> bool:
        return self.llm.vllm_config.device_config.device_type == "cpu"

    @property
    def version(self) -> str:
        from vllm import __version__

        return __version__

    @property
    def alive(self) -> bool:
        """Whether the core process runs and vLLM's client still talks to it."""
        return self.process.alive and not self.llm.errored

    def obituary(self) -> str:
        """Why the core is dead, as far as it said so itself."""
        cause = root_cause(self._scratch / "core.log")
        died = f"has died of {cause}" if cause else "has died without a word (killed?)"
        return f"vLLM's engine core (process {self.process.pid}) {died}; the replica must be restarted"

    async def stop(self) -> None:
        """End the core and every process that came with it, whatever state they are in."""
        await asyncio.to_thread(self.llm.shutdown, _PATIENCE_ON_CPU_S if self.on_cpu else _PATIENCE_S)
        await asyncio.to_thread(end, self._family, _PATIENCE_S)
        self.llm.engine_core.resources.ctx.destroy(linger=0)  # vLLM closes its sockets, not their context
        self.process.close()
        if not self.process.died.done():
            self.process.died.set_result(None)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _core_pid(llm: "AsyncLLM") -> int:
    from vllm.v1.engine.utils import CoreEngineProcManager

    manager = llm.engine_core.resources.engine_manager
    pids = [process.pid for process in manager.processes] if isinstance(manager, CoreEngineProcManager) else []
    if len(pids) != 1 or pids[0] is None:
        raise EngineError(
            "vLLM did not start exactly one engine core process; Concord replicas are single: use engine.replicas for "
            "more"
        )
    return pids[0]
