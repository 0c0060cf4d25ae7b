"""Makes the trainer's forward pass use experts that somebody else chose, with gates from its own logits (R3). It knows
no loss and no trajectory.

A hook on each router rewrites the router's answer: in covered rows whose given set of experts is not the native one,
the experts are the given ones and the gates are recomputed in float32 from the router's own logits over them, so
gradients reach the router through its gates. All other rows keep the router's answer bit for bit. The logits are never
touched: load-balance statistics, which the library computes from them, stay on native routing.

Hooks sit on modules, so they survive `fully_shard`. A checkpointed block that is computed again in backward must see
the same experts: it does under `trainer.model.policy_model`, which hands `same_replay_again` to the checkpoint; with a
checkpoint of another library, call backward inside `using`.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar, Token
from functools import partial
from types import MappingProxyType, TracebackType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rollout.engines.torch.moe_routers import RouterAnswer, RouterOutput, find_routers, read_answer
from rollout.errors import ConcordError, UserError

_GATE_TOLERANCE = 1e-4
_GATE_TOLERANCE_HALF = 2e-2
"""Largest |difference| between a router's own gates and ours over its own choice, for gates or logits in 16 bits."""


class ReplayedRows:
    """The routing that one forward pass was given, and what became of it."""

    def __init__(self, experts: Tensor, covered: Tensor) -> None:
        self.experts, self.covered = experts, covered
        self.num_rows = covered.shape[0]
        self.num_covered = int(covered.sum())
        """Rows with given experts; the others ran native."""
        self._replaced: dict[int, Tensor] = {}

    def replaced(self) -> NDArray[np.int64]:
        """[blocks] rows in which the given experts were others than the native ones. Blocks whose router has not run
        yet are not in it."""
        return np.array([int(self._replaced[block]) for block in sorted(self._replaced)], dtype=np.int64)

    def note(self, block: int, num_replaced: Tensor) -> None:
        """A router has run; one that runs again in backward repeats its number."""
        self._replaced[block] = num_replaced


class RoutingReplay:
    """Hooks on the routers; without effect outside `using`."""

    def __init__(self, model: nn.Module, num_experts: int, top_k: int) -> None:
        """Hook every router of `model`, before or after it is sharded.

        Raises:
            UserError: it has none.
        """
        self._num_experts, self._top_k = num_experts, top_k
        self._routers = find_routers(model)
        if not self._routers:
            raise UserError(
                f"{type(model).__name__} has no router whose choice could be replayed; use a mixture of experts or turn"
                " the replay off"
            )
        self._verified: set[int] = set()
        for block, router in enumerate(self._routers):
            router.register_forward_hook(partial(self._replay, block))

    @contextmanager
    def using(self, experts: Tensor, covered: Tensor) -> Generator[ReplayedRows]:
        """The forward pass inside uses the given experts; one inside another `using` of the same object takes the inner
        ones.

        Args:
            experts: [B*T, blocks, top_k] integers, rows in the order of the model's input ids; rows that are not
                covered may hold anything.
            covered: [B*T] bool.

        Raises:
            ValueError: shapes or dtypes are others.
            ConcordError: a covered row names an expert twice or one that does not exist, or a router did not run.
            UserError: the routers' gates are no softmax that could be recomputed.
        """
        given = self._given(experts, covered)
        token = _ACTIVE.set(MappingProxyType({**_ACTIVE.get(), self: given}))
        try:
            yield given
        finally:
            _ACTIVE.reset(token)
        ran = given.replaced().size
        if ran != len(self._routers):
            raise ConcordError(
                f"a routing was given for {len(self._routers)} MoE blocks, but {ran} of their routers ran; run the "
                "whole model inside `using`"
            )

    def _given(self, experts: Tensor, covered: Tensor) -> ReplayedRows:
        wanted = (covered.shape[0] if covered.ndim else 0, len(self._routers), self._top_k)
        if (
            tuple(experts.shape) != wanted
            or covered.ndim != 1
            or covered.dtype != torch.bool
            or experts.is_floating_point()
        ):
            got = f"experts {experts.dtype} {tuple(experts.shape)} and covered {covered.dtype} {tuple(covered.shape)}"
            raise ValueError(
                f"got {got}; expected integers [rows, {len(self._routers)} blocks, {self._top_k}] and bool [rows]"
            )
        ranked = experts[covered].to(torch.int64).sort(dim=-1).values
        wrong = (
            (ranked[..., :1] < 0).any()
            | (ranked[..., -1:] >= self._num_experts).any()
            | (ranked[..., 1:] == ranked[..., :-1]).any()
        )
        if bool(wrong):
            raise ConcordError(
                f"a covered row names an expert twice or one outside 0..{self._num_experts - 1}; such a row is padding:"
                " leave it out of `covered` (trainer.consistency.checks.routing.flat_routing does)"
            )
        device = next(self._routers[0].parameters()).device
        return ReplayedRows(experts.to(device), covered.to(device))

    def _replay(self, block: int, router: nn.Module, _args: object, output: RouterOutput) -> tuple[Tensor, ...] | None:
        given = _ACTIVE.get().get(self)
        if given is None:
            return None
        answer = read_answer(output, self._num_experts, self._top_k)
        logits, gates, native = self._told_apart(block, answer)
        if logits.shape[0] != given.num_rows:
            got = f"the router sees {logits.shape[0]} rows, but a routing was given for {given.num_rows}"
            raise ValueError(f"MoE block {block}: {got}; expected one row a token")
        renormalise = bool(getattr(router, "norm_topk_prob", True))
        if block not in self._verified:
            self._verify(block, logits, gates, native, renormalise=renormalise)
        asked = given.experts[:, block].to(logits.device, native.dtype)
        replaced = given.covered.to(logits.device) & (asked.sort(dim=-1).values != native.sort(dim=-1).values).any(
            dim=-1
        )
        given.note(block, replaced.sum())
        experts = torch.where(replaced[:, None], asked, native)
        recomputed = recomputed_gates(logits, experts, renormalise=renormalise).to(gates.dtype)
        parts = list(answer.parts)
        for place, rows in (
            (answer.experts, experts),
            (answer.gates, torch.where(replaced[:, None], recomputed, gates)),
        ):
            assert place is not None
            parts[place] = rows.view_as(parts[place])
        return tuple(parts)

    def _told_apart(self, block: int, answer: RouterAnswer) -> tuple[Tensor, Tensor, Tensor]:
        """Flat logits, gates and experts."""
        if answer.logits is None or answer.gates is None or answer.experts is None:
            shapes = [tuple(part.shape) for part in answer.parts]
            raise UserError(
                f"MoE block {block}: the router answers with {shapes}; a replay needs logits, gates and chosen experts:"
                " turn the replay off"
            )
        logits, gates, experts = (answer.parts[place] for place in (answer.logits, answer.gates, answer.experts))
        return logits.reshape(-1, self._num_experts), gates.reshape(-1, self._top_k), experts.reshape(-1, self._top_k)

    @torch.no_grad()
    def _verify(self, block: int, logits: Tensor, gates: Tensor, native: Tensor, *, renormalise: bool) -> None:
        """Once a router: our gates over its own choice are its own gates."""
        half = min(logits.dtype.itemsize, gates.dtype.itemsize) < 4
        tolerance = _GATE_TOLERANCE_HALF if half else _GATE_TOLERANCE
        ours = recomputed_gates(logits, native, renormalise=renormalise).to(gates.dtype)
        if not torch.allclose(ours, gates, rtol=0.0, atol=tolerance, equal_nan=True):
            gap = float((ours - gates).abs().max())
            got = f"the router's gates differ by {gap:.2g} from a softmax over its choice"
            raise UserError(f"MoE block {block}: {got}, so they cannot be replayed; turn the replay off")
        self._verified.add(block)


def recomputed_gates(logits: Tensor, experts: Tensor, *, renormalise: bool) -> Tensor:
    """[rows, top_k] softmax weights of `experts` [rows, top_k], at least in float32; differentiable in `logits` [rows,
    experts].

    Args:
        renormalise: the weights of the chosen experts sum to 1, which makes them a softmax over the chosen logits
            alone; else they are those among all experts.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if renormalise:
        return torch.softmax(logits.gather(-1, experts), dim=-1)
    return torch.softmax(logits, dim=-1).gather(-1, experts)


def same_replay_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The `context_fn` of a checkpointed block: its forward runs as it is, and its recomputation under the replays that
    are active now."""
    return nullcontext(), _Again(_ACTIVE.get())


_ACTIVE: ContextVar[Mapping[RoutingReplay, ReplayedRows]] = ContextVar(
    "routing replays of this thread", default=MappingProxyType({})
)


class _Again(AbstractContextManager[None]):
    """Reinstates replays, in whichever thread autograd runs; may be entered once a backward."""

    def __init__(self, active: Mapping[RoutingReplay, ReplayedRows]) -> None:
        self._active = active
        self._tokens: list[Token[Mapping[RoutingReplay, ReplayedRows]]] = []

    def __enter__(self) -> None:
        self._tokens.append(_ACTIVE.set(self._active))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _ACTIVE.reset(self._tokens.pop())
