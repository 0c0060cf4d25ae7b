"""The policy that the ledger holds, and which published weights must stay readable. Everyone who starts or updates a
replica reads it; only a publication moves it on."""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from rollout.types.weights import PolicyVersion, WeightManifest


class CommittedWeights:
    """The committed manifest of the run."""

    def __init__(self, first: WeightManifest) -> None:
        self._manifest = first
        self._held: Counter[PolicyVersion] = Counter()

    @property
    def manifest(self) -> WeightManifest:
        """What new incarnations start on."""
        return self._manifest

    @property
    def policy(self) -> PolicyVersion:
        """The newest policy of the ledger."""
        return self._manifest.policy

    def move_to(self, manifest: WeightManifest) -> None:
        self._manifest = manifest

    @contextmanager
    def hold(self, policy: PolicyVersion) -> Generator[None]:
        """Keep the weights of `policy` readable while a replica takes them."""
        self._held += Counter((policy,))
        try:
            yield
        finally:
            self._held -= Counter((policy,))

    def in_use(self) -> set[PolicyVersion]:
        """Policies whose published weights a replica may still ask for."""
        return {self.policy, *self._held}
