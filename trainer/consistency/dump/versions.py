"""Which policies a dump's versions can be: those of a directory of published weights, or whatever it says where there
is none. Torch-free."""

from collections.abc import Iterator
from pathlib import Path

from rollout.errors import UserError
from rollout.published.manifest import MANIFEST_NAME
from rollout.types.weights import PolicyVersion
from trainer.consistency.dump.values import VersionEntry

BASE = PolicyVersion(1, 0)
"""Version 0: the model directory itself, whatever the epoch."""


class PublishedVersions:
    """The policies of a `weights` directory of a run, and version 0."""

    def __init__(self, weights_dir: Path) -> None:
        """List the directory.

        Raises:
            UserError: it holds no published policy.
        """
        if not weights_dir.is_dir():
            what = "is not a directory" if weights_dir.exists() else "does not exist"
            raise UserError(
                f"got --weights {weights_dir}, which {what}; give the `weights` folder of a run, with a folder eE-vN a "
                "version"
            )
        self.policies = frozenset(_published(weights_dir))
        if not self.policies:
            raise UserError(
                f"got --weights {weights_dir}, which holds no published version; expected folders eE-vN with a "
                f"{MANIFEST_NAME} each"
            )

    def policy(self, version: VersionEntry) -> PolicyVersion:
        """The policy that an entry names; one that was not published keeps epoch 1 and is for the check of versions to
        find.

        Raises:
            ValueError: it names none, or several epochs published this number.
        """
        if not isinstance(version, int) or version == 0:
            return policy_named(version)
        found = sorted(policy for policy in self.policies if policy.version == version)
        if len(found) > 1:
            raise ValueError(
                f"got version {version}, which {', '.join(policy.key for policy in found)} all are; expected one of "
                "these names"
            )
        return found[0] if found else PolicyVersion(1, version)


def policy_named(version: VersionEntry) -> PolicyVersion:
    """The policy that an entry names: `eE-vN`, or a number of epoch 1.

    Raises:
        ValueError: it names none.
    """
    if isinstance(version, str):
        return PolicyVersion.parse(version)
    if version is None:
        raise ValueError("got no version; expected one where a token was sampled")
    return PolicyVersion(1, version)


def _published(weights_dir: Path) -> Iterator[PolicyVersion]:
    for manifest in weights_dir.glob(f"*/{MANIFEST_NAME}"):
        try:
            yield PolicyVersion.parse(manifest.parent.name)
        except ValueError:
            continue  # a temporary name: not published yet
