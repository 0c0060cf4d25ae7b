"""What the scripted engine answers: tokens, log-probs, latencies, lengths, all functions of a sample's key. It knows no
time."""

import numpy as np
from numpy.typing import NDArray

from rollout.errors import UserError

_POOL = 1 << 16
_MASK = (1 << 64) - 1


def draw_bits(key: int) -> int:
    """64 well-mixed bits from a sampling key (splitmix64); the draws of one sample come from four fields of 16 bits."""
    value = (key + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class ScriptedDraws:
    """Slices of pools that are drawn once, so that a token costs next to nothing."""

    def __init__(self, vocab_size: int, latency_mean_s: float, latency_sigma: float) -> None:
        self._vocab_size = vocab_size
        self._logprobs = self._draw_logprobs(_POOL)
        self._tokens: dict[tuple[int, ...], NDArray[np.int32]] = {}
        normal = np.random.default_rng(2).standard_normal(_POOL)
        self._latency_s = latency_mean_s * np.exp(latency_sigma * normal - latency_sigma**2 / 2)

    def latency_s(self, bits: int) -> float:
        """Seconds that a sample occupies a slot: log-normal, with the configured mean whatever sigma is."""
        return float(self._latency_s[bits % _POOL])

    def length(self, bits: int, shortest: int, longest: int) -> int:
        """Tokens of a sample, uniform over shortest..longest."""
        return shortest + (bits >> 16) % (longest - shortest + 1)

    def tokens(self, bits: int, start: int, stop: int, eos_ids: tuple[int, ...]) -> NDArray[np.int32]:
        """Tokens [start, stop) of a sample, none of them an end token. A read-only view."""
        pool = self._tokens.get(eos_ids)
        offset = (bits >> 32) % _POOL
        if pool is None or pool.size < offset + stop:
            pool = self._tokens[eos_ids] = self._draw_tokens(_POOL + 2 * stop, eos_ids)
        return pool[offset + start : offset + stop]

    def logprobs(self, bits: int, start: int, stop: int) -> NDArray[np.float32]:
        """Log-probs of tokens [start, stop), in nats. A read-only view."""
        offset = bits >> 48
        if self._logprobs.size < offset + stop:
            self._logprobs = self._draw_logprobs(_POOL + 2 * stop)
        return self._logprobs[offset + start : offset + stop]

    def _draw_tokens(self, size: int, eos_ids: tuple[int, ...]) -> NDArray[np.int32]:
        allowed = np.setdiff1d(np.arange(self._vocab_size, dtype=np.int32), np.asarray(eos_ids, dtype=np.int32))
        if not allowed.size:
            raise UserError(
                f"got engine.vocab_size = {self._vocab_size} and end tokens {eos_ids}; expected a token that ends "
                "nothing: raise engine.vocab_size"
            )
        pool = allowed[(np.random.default_rng(0).random(size) * allowed.size).astype(np.int64)]
        pool.setflags(write=False)
        return pool

    @staticmethod
    def _draw_logprobs(size: int) -> NDArray[np.float32]:
        pool = (np.log1p(-np.random.default_rng(1).random(size)) / 2).astype(np.float32)
        pool.setflags(write=False)
        return pool
