"""A core process is seen to die at once, and dies with the process that owns it. Plain processes stand in for
vLLM's."""

import asyncio
import os
import signal
import sys
import textwrap

import psutil
import pytest

from rollout.engines.vllm.process import CoreProcess, descendants, end

DEADLINE_S = 30.0


async def start(*source: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent("\n".join(source)), stdout=asyncio.subprocess.PIPE
    )


def test_the_death_of_a_process_is_seen_without_asking():
    async def watch() -> bool:
        child = await start("import signal; print('up', flush=True); signal.pause()")
        assert child.stdout is not None
        await child.stdout.readline()
        core = CoreProcess(child.pid)
        assert core.alive
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            await core.died
            await child.wait()
        core.close()
        return core.alive

    assert not asyncio.run(watch())


def test_processes_that_ignore_the_end_are_killed():
    async def leave() -> None:
        child = await start(
            "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
        )
        assert child.stdout is not None
        await child.stdout.readline()
        process = psutil.Process(child.pid)
        assert process in descendants()
        assert process not in descendants({child.pid})
        await asyncio.to_thread(end, [process], 0.1)
        async with asyncio.timeout(DEADLINE_S):
            await child.wait()  # its status says nothing: `end` may have been the one that collected it
        assert not process.is_running()

    asyncio.run(leave())


@pytest.mark.timeout(120)  # the owner's child imports torch
def test_the_core_dies_with_its_owner():
    """Owner -> core -> worker: when the owner is killed, the worker ends the core and itself."""
    core = """
        import os, subprocess, sys
        worker = 'from rollout.engines.vllm.worker_extension import ConcordWorkerExtension as E; import signal, sys; '
        worker += 'E().concord_end_with(int(sys.argv[1])); print("up", flush=True); signal.pause()'
        subprocess.run([sys.executable, '-c', worker, str(os.getppid())])
    """
    owner = f"""
        import subprocess, sys
        subprocess.run([sys.executable, '-c', {textwrap.dedent(core)!r}])
    """

    async def kill() -> None:
        child = await start(owner)
        assert child.stdout is not None
        async with asyncio.timeout(100):
            await child.stdout.readline()
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) == 2
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        _, left = await asyncio.to_thread(psutil.wait_procs, family, DEADLINE_S)
        assert not [process for process in left if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    asyncio.run(kill())
