"""Values of each block in a step, for those who ask: how far its weights move, what it hands on, how its experts share
the work. Layer 3 of diagnosis.

    with probes.recording(micro): forward        with probes.updating(): optimizer        probes.take() -> (probe,
    block, value)

Every value comes from sums over all inputs that predict something, or over all weights, so it does not depend on
micro-batches, ranks or sharding. It knows no clip and no loss.
"""

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from rollout.engines.torch.moe_routers import RouterOutput, chosen_experts, expert_counts, find_routers, read_answer
from rollout.errors import UserError
from trainer.config.trainer import ProbesConfig
from trainer.model.blocks import Block, num_replicas
from trainer.model.policy_model import PolicyModel
from trainer.model.ranks import Ranks, local_tensors
from trainer.model.tensor_norms import squared_norms
from trainer.types.step import MicroBatch

_torch: Any = torch
"""For the foreach functions, which torch itself calls private."""

Probed = tuple[str, str, float]
"""(probe, block, value)"""


class Probes:
    """One rank's part; those that are off cost nothing."""

    def __init__(self, config: ProbesConfig, model: PolicyModel, blocks: Sequence[Block], ranks: Ranks) -> None:
        """Hook the blocks and routers of `model` as far as `config` asks; `blocks` are those whose updates are
        measured.

        Raises:
            UserError: the load of routers is asked for, and the model has none.
        """
        self._config, self._blocks, self._ranks = config, blocks, ranks
        self._mask: Tensor | None = None
        self._outputs: tuple[str, ...] = ()
        self._routed: tuple[str, ...] = ()
        self._num_experts, self._top_k, self._width = 1, 1, 0
        if config.activations:
            self._outputs = tuple(model.named_blocks())
            for index, block in enumerate(model.blocks()):
                block.register_forward_hook(partial(self._see_output, index))
        if config.router_load:
            self._hook_routers(model)
        self._tokens, self._powers, self._load, self._squares = self._empty()

    def recording(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """The forward pass of `micro` inside is measured; backward belongs outside."""
        return self._recording(micro) if self._outputs or self._routed else nullcontext()

    def updating(self) -> AbstractContextManager[None]:
        """What the weights change inside is measured, at the cost of one more copy of this rank's shards meanwhile."""
        return self._updating() if self._config.update_ratio else nullcontext()

    def take(self) -> tuple[Probed, ...]:
        """What was measured since the last call. Collective: one reduction if any probe is on."""
        parts = (self._tokens, self._powers, self._load, self._squares)
        if not any(part.numel() for part in parts[1:]):
            return ()
        whole: Any = self._ranks.sum(torch.cat([part.flatten() for part in parts])).cpu()
        sums = cast(tuple[Tensor, ...], whole.split([part.numel() for part in parts]))
        tokens, powers, load, squares = (one.reshape(part.shape) for one, part in zip(sums, parts, strict=True))
        self._tokens, self._powers, self._load, self._squares = self._empty()
        return (*self._activations(float(tokens), powers), *self._router_load(load), *self._update_ratio(squares))

    def _empty(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Tokens [1]; sums of squares and 4th powers [blocks, 2]; tokens of each expert [blocks, experts]; squares of
        change and weights [blocks, 2]."""
        updated = len(self._blocks) if self._config.update_ratio else 0
        shapes = ((1,), (len(self._outputs), 2), (len(self._routed), self._num_experts), (updated, 2))
        tokens, powers, load, squares = (
            torch.zeros(shape, dtype=torch.float64, device=self._ranks.device) for shape in shapes
        )
        return tokens, powers, load, squares

    def _hook_routers(self, model: PolicyModel) -> None:
        counts = expert_counts(model.text_config)
        routed = {name: router for name, block in model.named_blocks().items() for router in find_routers(block)[:1]}
        if counts is None or not routed:
            raise UserError(
                f"got trainer.probes.router_load = true, but {model.architecture} is not a mixture of experts; set it "
                "to false"
            )
        self._num_experts, self._top_k = counts
        self._routed = tuple(routed)
        for index, router in enumerate(routed.values()):
            # Behind a replay's hook: what counts is which experts work.
            router.register_forward_hook(partial(self._see_routing, index))

    @contextmanager
    def _recording(self, micro: MicroBatch) -> Generator[None]:
        device = self._ranks.device
        lengths = torch.tensor(micro.lengths, device=device)
        # The last token of a row predicts nothing; the model reads it only where a longer row stands beside.
        self._mask = torch.arange(micro.token_ids.shape[1] - 1, device=device) < lengths[:, None] - 1
        self._tokens += self._mask.sum()
        try:
            yield
        finally:
            self._mask = None

    @torch.no_grad()
    def _see_output(self, index: int, _block: nn.Module, _args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if self._mask is None:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        squares = hidden.detach().float().square()
        rows = torch.stack([squares.sum(-1), cast(Any, torch.linalg).vecdot(squares, squares)]).double()
        self._powers[index] += (rows * self._mask).sum(dim=(1, 2))
        self._width = hidden.shape[-1]

    @torch.no_grad()
    def _see_routing(self, index: int, _router: nn.Module, _args: object, output: RouterOutput) -> None:
        if self._mask is None:
            return
        chosen = chosen_experts(read_answer(output, self._num_experts, self._top_k), self._top_k).to(torch.int64)
        real = self._mask.reshape(-1, 1).expand_as(chosen).double()
        self._load[index].index_add_(0, chosen.flatten(), real.flatten())

    @contextmanager
    def _updating(self) -> Generator[None]:
        weights = [local_tensors(block.parameters) for block in self._blocks]
        before = [[one.detach().clone() for one in block] for block in weights]
        yield
        with torch.no_grad():
            for index, block in enumerate(self._blocks):
                replicas = torch.tensor(
                    [num_replicas(one, self._ranks.world) for one in block.parameters],
                    dtype=torch.float64,
                    device=self._ranks.device,
                )
                _torch._foreach_sub_(before[index], weights[index])
                for column, tensors in enumerate((before[index], weights[index])):
                    self._squares[index, column] += (squared_norms(tensors) / replicas).sum()

    def _activations(self, tokens: float, powers: Tensor) -> Iterator[Probed]:
        elements = tokens * self._width
        for name, (second, fourth) in zip(self._outputs, _rows(powers), strict=True):
            if elements:
                yield "activation_rms", name, math.sqrt(second / elements)
                yield "activation_kurtosis", name, elements * fourth / second**2 if second else math.nan

    def _router_load(self, load: Tensor) -> Iterator[Probed]:
        for name, tokens in zip(self._routed, _rows(load), strict=True):
            total = sum(tokens)
            if total:
                yield "router_load_max", name, max(tokens) * len(tokens) / total
                yield (
                    "router_load_entropy",
                    name,
                    -sum(count / total * math.log(count / total) for count in tokens if count),
                )

    def _update_ratio(self, squares: Tensor) -> Iterator[Probed]:
        for block, (change, weight) in zip(self._blocks, _rows(squares), strict=False):
            if weight:
                yield "update_ratio", block.name, math.sqrt(change / weight)


def _rows(values: Tensor) -> list[list[float]]:
    return cast(list[list[float]], cast(Any, values).tolist())
