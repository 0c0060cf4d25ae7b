"""Whether planted gradient spikes are found, in how many passes, and what a search and a step without one cost.

`search`: single spikes, pairs of them, healthy and diffuse steps, on one and two ranks, with one and four
micro-batches, dense and mixture of experts. `cost`: a search over the time of its step. `dormant`: CPU seconds of steps
that are only watched, in interleaved pairs with steps that are not.
"""

from collections.abc import Callable
from typing import Any

from harness.gradloc_cost import FEATURES, dormant, memory, search_cost
from harness.gradloc_search import all_cases, merged
from harness.rank_processes import on_ranks
from harness.runs import parser, report


def search(count: int, seed: int) -> dict[str, Any]:
    """All kinds of cases on one rank and on two, `count` single spikes in all."""
    worlds = [on_ranks(world, all_cases, -(-count // 2), seed) for world in (1, 2)]
    return {name: merged([world[name] for world in worlds]) for name in worlds[0]}


def main() -> None:
    arguments = parser(str(__doc__))
    arguments.add_argument("--count", type=int, default=1000, help="single spikes; the other kinds follow from it")
    arguments.add_argument("--seed", type=int, default=0, help="of the cases")
    arguments.add_argument("--pairs", type=int, default=20, help="interleaved pairs of each comparison")
    arguments.add_argument("--only", choices=("search", "cost", "dormant"), default=None)
    arguments.add_argument(
        "--feature", action="append", choices=FEATURES, help="of `dormant`: this one only; may come again"
    )
    chosen = arguments.parse_args()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "search": lambda: search(chosen.count, chosen.seed),
        "cost": lambda: {**on_ranks(2, search_cost, chosen.pairs), **on_ranks(2, memory)},
        "dormant": lambda: on_ranks(1, dormant, chosen.pairs, chosen.feature or ()),
    }
    report({name: part() for name, part in parts.items() if chosen.only in (None, name)}, chosen)


if __name__ == "__main__":
    main()
