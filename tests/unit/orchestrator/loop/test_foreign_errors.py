"""What nobody foresaw, in the middle of a run: a dispatch ends and its prompt comes again, or the run says why it
ends."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from support.loop.engine_wrap import EngineWrap
from support.loop.loop_case import Case, assert_accounted
from support.loop.run_record import events_of

from rollout.types.generation import GenerationRequest, TokenChunk


class CancelsItself(EngineWrap):
    """The answer to the first attempt at `d00000001` depends on something that is cancelled."""

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        if request.request_id.startswith("d00000001"):
            raise asyncio.CancelledError
        async for chunk in self.engine.generate(request):
            yield chunk


def test_a_dispatch_whose_episode_is_cancelled_from_outside_does_not_run_for_ever(tmp_path: Path) -> None:
    """In order `dispatch`, the whole run would wait for it."""
    case = Case(
        tmp_path, "staleness.order=dispatch", "deadlines.stall_s=5", wrap=lambda engine, slot: CancelsItself(engine)
    )
    summary = case.drive()
    assert summary["version"] == 8
    assert summary["failed"] == {"worker": 1}
    assert_accounted(summary)
    details = [event["detail"] for event in events_of(case.run.path) if event["kind"] == "failed"]
    assert details == ["d00000001: what it waited for was cancelled"]
