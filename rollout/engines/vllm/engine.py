"""vLLM's AsyncLLM as an `Engine`: whole samples in, chunks cut by vLLM's own version spans out, weights replaced in
mid-generation.

It owns the replica's state (what is served, what runs, whether it is paused) and the order pause, apply, resume. It
never decides which policy is served or when: that is the publisher's.
"""

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout.config import VllmConfig
from rollout.engines.serving.requests import NOTHING, check_ids, refuse_running, refuse_several
from rollout.engines.serving.usage import Usage
from rollout.engines.vllm.core import VllmCore
from rollout.engines.vllm.launch import quiet_vllm
from rollout.engines.vllm.layout import Layout, layout_of, refuse_difference
from rollout.engines.vllm.requests import Limits, Part, aborted_chunks, chunks_of, parts_of, scoring_params
from rollout.engines.vllm.routing import expert_layers
from rollout.engines.vllm.transfer import announced, check_transport
from rollout.errors import ConcordError, EngineError, UserError, boundary
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory
from rollout.tasks import Tasks
from rollout.types.engine_identity import EngineIdentity
from rollout.types.generation import GenerationRequest, PauseMode, SamplingParams, TokenChunk
from rollout.types.protocols import EngineLoad
from rollout.types.trajectory import EngineTag
from rollout.types.weights import ApplyReport, PolicyVersion, Transport, WeightManifest

_CANARY_PRIORITY = -1
"""Lower goes first; samples have 0."""
_PING_DEADLINE_S = 10.0


class VllmEngine:
    """One vLLM replica; see the module and `rollout.types.protocols.Engine`."""

    def __init__(self, config: VllmConfig, identity: EngineIdentity) -> None:
        quiet_vllm()
        self._config, self._identity = config, identity
        self._core: VllmCore | None = None
        self._starting = Tasks()
        self._limits = Limits(0, 0)
        self._expected: Layout = {}
        self._policies: dict[str, PolicyVersion] = {}
        self._policy: PolicyVersion | None = None
        self._digest = ""
        self._requests: dict[str, list[Part]] = {}
        self._aborted: set[str] = set()
        self._usage = Usage(time.monotonic)
        self._paused_at_s: float | None = None
        self._interrupted = 0
        self._loading = False
        self._broken = ""
        self._names = itertools.count()

    async def start(self, manifest: WeightManifest) -> EngineTag:
        """Load the model in the manifest's directory, take its label, and run one request so that nothing is left to be
        compiled.

        Raises:
            UserError: model, config and machine do not fit together, or the config asks for what vLLM cannot do.
            EngineError: the engine core did not start.
        """
        if self._identity.deterministic:
            raise UserError(
                "deterministic mode needs results that do not depend on arrival times, which vLLM does not give; set"
                ' engine.type = "torch"'
            )
        if manifest.transport is not Transport.DISK:
            raise UserError(
                f"the first weights come from a complete model directory; got transport {manifest.transport.value!r}"
            )
        entries = await asyncio.to_thread(digest_directory, Path(manifest.location))
        self._expected = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        layers = self._expert_layers()
        start = VllmCore.start(manifest.location, self._config, self._identity)
        core = self._core = await self._starting.run(start, "starting vLLM")
        config = core.llm.model_config
        self._limits = Limits(config.max_model_len, config.get_vocab_size(), layers)
        await self._take_label(core, manifest.policy, manifest_digest(entries))
        await self._warm_up(core)
        return await self.tag()

    def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Sample; the chunks of a request without seeds come when its last sample has ended, with seeds those of each
        sample when it has."""
        return self._serve(request, NOTHING)

    def resume_from(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        """Continue one sample; `max_new_tokens` counts `produced`."""
        refuse_several(request)
        return self._serve(request, produced)

    async def abort(self, request_id: str) -> None:
        """End a request's samples where they stand; works while paused, too."""
        parts = self._requests.get(request_id)
        if parts is not None:
            self._aborted.add(request_id)
            await self._running_core().abort([part.key for part in parts])

    async def score(self, token_ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """Raw log-probs at the head of the queue. While the engine is paused the answer waits for `resume`.

        Raises:
            UserError: the ids do not fit into the context or the vocabulary.
        """
        from vllm.inputs.engine import tokens_input

        core = self._running_core()
        check_ids("score", token_ids, self._limits.vocab_size)
        if token_ids.size >= self._limits.context_tokens:
            raise UserError(
                f"got {token_ids.size} tokens to score; vLLM takes one less than the context of "
                f"{self._limits.context_tokens}: raise engine.max_model_len"
            )
        if token_ids.size == 1:
            return np.zeros(0, dtype=np.float32)
        key, prompt = f"score-{next(self._names)}", tokens_input(token_ids.tolist())
        output = await core.call(key, core.complete(prompt, scoring_params(), key, _CANARY_PRIORITY))
        logprobs = np.asarray(getattr(output.prompt_logprobs, "logprobs", ()), dtype=np.float32)
        if logprobs.size != token_ids.size - 1:
            raise EngineError(f"vLLM scored {logprobs.size} of {token_ids.size - 1} tokens")
        return logprobs

    async def pause(self, mode: PauseMode) -> None:
        """Stop between two steps. A second pause changes nothing.

        DRAIN finishes what has been admitted to the batch; what still waits, waits on.

        Raises:
            EngineError: `keep` on an engine that shares prefixes (configured `recompute`): its tag would lie.
        """
        core = self._running_core()
        if self._paused_at_s is not None:
            return
        if mode is PauseMode.KEEP and self._config.kv_across_versions != "keep":
            got = f'engine.kv_across_versions = "{self._config.kv_across_versions}"'
            raise EngineError(f'got pause mode keep with {got}; set it to "keep"')
        started_s = time.monotonic()
        await core.pause(drain=mode is PauseMode.DRAIN, clear_cache=mode is not PauseMode.KEEP)
        self._paused_at_s = time.monotonic() if mode is PauseMode.DRAIN else started_s
        self._interrupted = len(self._requests)

    async def apply(self, manifest: WeightManifest) -> ApplyReport:
        """Load, check that every parameter arrived, take the label. `pause_s` counts from the call of `pause` (for
        drain, from its end) to here.

        Raises:
            EngineError: the engine is not paused, or the tensors are not those of the model (the old weights then
                stay), or loading broke off (the engine is then unhealthy and refuses to resume).
            UserError: the transport cannot work here.
        """
        core = self._running_core()
        if self._paused_at_s is None:
            raise EngineError(f"got weights {manifest.policy.key} while sampling; pause the engine first")
        check_transport(manifest, on_cpu=core.on_cpu)
        disk = manifest.transport is Transport.DISK
        offered = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
        offered = layout_of(Path(manifest.location)) if disk else offered
        refuse_difference(offered, self._expected, manifest.location)
        if disk:
            call = core.rpc("concord_load", manifest.location)
        else:
            first_rank = self._identity.replica * self._config.tensor_parallel_size
            call = core.rpc("concord_receive", manifest.location, announced(manifest.tensors), first_rank)
        self._loading, self._broken = True, f"weights {manifest.policy.key} arrived in part"
        try:
            await self._take_label(core, manifest.policy, await call)
            self._broken = ""
        finally:
            self._loading = False
        return ApplyReport(
            policy=manifest.policy,
            digest=self._digest,
            pause_s=time.monotonic() - self._paused_at_s,
            interrupted=self._interrupted,
        )

    async def resume(self) -> None:
        """Go on. Without a pause it changes nothing.

        Raises:
            EngineError: the last `apply` broke off: neither the old nor the new policy is whole.
        """
        if self._broken:
            raise EngineError(f"replica {self._identity.replica}: {self._broken}, so it must not sample; restart it")
        if self._paused_at_s is not None:
            await self._running_core().resume()
            self._paused_at_s = None

    async def tag(self) -> EngineTag:
        core = self._running_core()
        return self._identity.tag(
            "vllm",
            core.version,
            dtype=self._config.dtype,
            kv_across_versions=self._config.kv_across_versions,
            weights_digest=self._digest,
            quantization=core.llm.model_config.quantization or "none",
        )

    async def healthy(self) -> bool:
        """Whether the core lives, answers, and serves whole weights. A core that loads weights is not asked."""
        core = self._core
        if core is None or not core.alive or (self._broken and not self._loading):
            return False
        if self._loading:
            return True
        try:
            async with asyncio.timeout(_PING_DEADLINE_S):
                await core.call("ping", core.llm.get_weight_version())
        except (EngineError, TimeoutError):
            return False
        return True

    async def load(self) -> EngineLoad:
        """Samples accepted and not answered; tokens count when their sample is answered."""
        return self._usage.load()

    async def stop(self) -> None:
        """End the engine core, also in the middle of a start."""
        await self._starting.close()
        if self._core is not None:
            core, self._core = self._core, None
            await core.stop()
            del core
            # vLLM's client sits in a cycle; collected at interpreter exit instead, it would complain.
            await asyncio.to_thread(gc.collect)

    def _expert_layers(self) -> tuple[int, ...]:
        """Layers whose routing is asked for.

        Raises:
            UserError: it is asked for, and the model has none.
        """
        if not self._config.return_routing:
            return ()
        layers = expert_layers(self._expected)
        if not layers:
            raise UserError(
                "got engine.return_routing = true, but the model is not a mixture of experts; set it to false"
            )
        return layers

    def _running_core(self) -> VllmCore:
        if self._core is None:
            raise EngineError(f"vLLM replica {self._identity.replica} is not running; call start first")
        if not self._core.alive:
            raise EngineError(f"replica {self._identity.replica}: {self._core.obituary()}")
        return self._core

    async def _serve(self, request: GenerationRequest, produced: NDArray[np.int32]) -> AsyncIterator[TokenChunk]:
        core, name = self._running_core(), request.request_id
        refuse_running(request, self._requests, self._identity.replica)
        parts = self._requests[name] = parts_of(request, produced, self._limits)
        self._usage.began(request.num_samples)
        answers, running = asyncio.Queue[list[TokenChunk] | ConcordError](), Tasks()
        for part in parts:
            running.start(self._answer(core, name, part, answers), answers.put_nowait, f"request {name}")
        try:
            for _ in parts:
                answer = await core.call(f"request {name}", answers.get())
                if isinstance(answer, ConcordError):
                    raise answer
                for chunk in answer:
                    yield chunk
        finally:
            self._usage.ended(request.num_samples)
            del self._requests[name]
            self._aborted.discard(name)
            await running.close()

    async def _answer(
        self, core: VllmCore, name: str, part: Part, answers: "asyncio.Queue[list[TokenChunk] | ConcordError]"
    ) -> None:
        if name in self._aborted:
            answers.put_nowait(aborted_chunks(name, part, self._served()))  # before vLLM knew of it
            return
        with boundary(EngineError, f"request {name}"):
            output = await core.complete(part.prompt, part.params, part.key, priority=0)
        chunks = chunks_of(name, part, output, self._policies, self._served(), self._limits.expert_layers)
        self._usage.generated(sum(chunk.token_ids.size for chunk in chunks))
        answers.put_nowait(chunks)

    def _served(self) -> PolicyVersion:
        if self._policy is None:
            raise EngineError(f"vLLM replica {self._identity.replica} serves no policy yet; call start first")
        return self._policy

    async def _take_label(self, core: VllmCore, policy: PolicyVersion, digest: str) -> None:
        await core.call("label", core.llm.update_weight_version(policy.key))
        self._policies[policy.key] = self._policy = policy
        self._digest = digest

    async def _warm_up(self, core: VllmCore) -> None:
        """One request and one score: what vLLM compiles or allocates at its first step is not left to the first real
        request."""
        key = f"warm-up-{next(self._names)}"
        sampling = SamplingParams(max_new_tokens=2, ignore_eos=True)
        request = GenerationRequest(
            request_id=key, prompt_ids=np.zeros(2, dtype=np.int32), num_samples=2, sampling=sampling, eos_ids=()
        )
        for part in parts_of(request, NOTHING, self._limits):
            await core.call(key, core.complete(part.prompt, part.params, part.key, priority=0))
        await self.score(request.prompt_ids)
