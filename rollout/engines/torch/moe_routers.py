"""Which modules of a mixture-of-experts model choose experts, and what their answers hold. It knows no engine, no
request and no trainer.

A router answers with some of: logits [rows, experts], gates [rows, top_k] (the weights of the chosen experts) and the
chosen experts [rows, top_k]; which part is which follows from shapes and dtypes, since libraries order them
differently.
"""

from dataclasses import dataclass

from torch import Tensor, nn

RouterOutput = Tensor | tuple[Tensor, ...]

_ROUTER_NAMES = ("gate", "router")
_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterAnswer:
    """The parts of a router's output, and the index of each kind among them; None where the router does not give it."""

    parts: tuple[Tensor, ...]
    logits: int | None
    gates: int | None
    experts: int | None


def find_routers(model: nn.Module) -> list[nn.Module]:
    """The routers in the order of their blocks: of each module that holds `experts`, its `gate` or `router`. Empty for
    a dense model."""
    routers: list[nn.Module] = []
    for block in model.modules():
        if hasattr(block, "experts"):
            named = [getattr(block, name, None) for name in _ROUTER_NAMES]
            routers += [router for router in named if isinstance(router, nn.Module)][:1]
    return routers


def expert_counts(config: object) -> tuple[int, int] | None:
    """(experts a block, experts a token) of a Hugging Face model config; None when it names no experts."""
    top_k = getattr(config, "num_experts_per_tok", None)
    for name in _COUNT_NAMES:
        num_experts = getattr(config, name, None)
        if isinstance(num_experts, int) and isinstance(top_k, int):
            return num_experts, top_k
    return None


def read_answer(output: RouterOutput, num_experts: int, top_k: int) -> RouterAnswer:
    """Tell the parts of a router's output apart."""
    parts = output if isinstance(output, tuple) else (output,)
    floating = [i for i, part in enumerate(parts) if part.is_floating_point()]
    logits = next((i for i in floating if parts[i].shape[-1] == num_experts), None)
    gates = next((i for i in floating if i != logits and parts[i].shape[-1] == top_k), None)
    experts = next((i for i, part in enumerate(parts) if i not in floating and part.shape[-1] == top_k), None)
    return RouterAnswer(parts=parts, logits=logits, gates=gates, experts=experts)


def chosen_experts(answer: RouterAnswer, top_k: int) -> Tensor:
    """[rows, top_k] the router's choice, or the top k of its logits where it leaves the choice to its block.

    Raises:
        ValueError: the answer holds neither.
    """
    if answer.experts is not None:
        return answer.parts[answer.experts].reshape(-1, top_k)
    if answer.logits is None:
        shapes = [tuple(part.shape) for part in answer.parts]
        raise ValueError(
            f"a router answered with shapes {shapes}; expected chosen experts [rows, {top_k}] or logits [rows, experts]"
        )
    logits = answer.parts[answer.logits]
    return logits.reshape(-1, logits.shape[-1]).float().topk(top_k, dim=-1).indices
