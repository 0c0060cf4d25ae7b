"""Builds the tiny model on the spot, once: a cached Hugging Face directory named by the digest of all that went into
it."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path

from rollout.published.digests import json_digest
from trainer.config.trainer import TinyModelConfig

_SOURCES = ("tiny.py", "model.py", "optimizer.py", "training.py")


def default_cache_dir() -> Path:
    """`concord/tiny` in the user's cache folder (XDG_CACHE_HOME, else ~/.cache)."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "concord" / "tiny"


def tiny_digest(config: TinyModelConfig) -> str:
    """What the built model depends on: the config, this code and the libraries that compute."""
    code = {name: sha256((Path(__file__).parent / name).read_bytes()).hexdigest() for name in _SOURCES}
    libraries = {name: version(name) for name in ("torch", "transformers", "tokenizers")}
    return json_digest({"config": config.model_dump(mode="json"), "code": code, "libraries": libraries})[:16]


def cached_tiny(config: TinyModelConfig, cache_dir: Path) -> Path | None:
    """The directory of the model if it is built already. Imports no torch."""
    final = cache_dir / tiny_digest(config)
    return final if final.is_dir() else None


def build_tiny(config: TinyModelConfig, cache_dir: Path, progress: Callable[[str], None] = lambda _: None) -> Path:
    """The directory of the model in Hugging Face format, built if it is not cached yet.

    Several processes may build at once: each works in a directory of its own, the first to finish gives its own the
    final name, and the others take that one. A directory with the final name is complete.

    Args:
        config: what to build.
        cache_dir: where models are kept, one folder a digest.
        progress: is given a line at a time about the warm start.

    Raises:
        UserError: the warm start did not reach the target accuracy.
    """
    final = cache_dir / tiny_digest(config)
    if final.is_dir():
        return final
    cache_dir.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}-", dir=cache_dir))
    try:
        _build_into(building, config, progress)
        _sync(building)
        try:
            building.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return final


def _build_into(directory: Path, config: TinyModelConfig, progress: Callable[[str], None]) -> None:
    from trainer.tiny.training import build_model  # only now: a cached model needs no torch

    progress(f"building the tiny {'MoE' if config.moe else 'dense'} model, seed {config.seed}")
    reached = build_model(directory, config, progress)
    (directory / "warm_start.json").write_text(json.dumps(reached))
    directory.chmod(0o755)


def _sync(directory: Path) -> None:
    """Make the files durable before the directory gets its final name."""
    for file in directory.iterdir():
        with file.open("rb") as reader:
            os.fsync(reader.fileno())
