"""Whether a directory can hold a store: SQLite's write-ahead log needs shared memory and locks that network file
systems do not give."""

import re
from pathlib import Path

from rollout.errors import StoreError

_SHARES = ("nfs", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs")
_CLUSTERS = ("lustre", "ceph", "glusterfs", "beegfs", "gpfs", "orangefs", "wekafs", "ocfs2", "gfs2")
_FUSE = ("sshfs", "glusterfs", "ceph", "s3fs", "gcsfuse", "goofys", "mount-s3", "rclone", "juicefs", "blobfuse2")
NETWORK_TYPES = frozenset(_SHARES + _CLUSTERS) | {f"fuse.{name}" for name in _FUSE}
MOUNTS = Path("/proc/mounts")


def file_system_of(path: Path, mounts: str) -> tuple[str, str]:
    """(mount point, file system type) that holds the absolute `path`, by the text of /proc/mounts; ("/", "unknown") if
    no line matches."""
    best = ("/", "unknown")
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        # Of two mounts at one point the later hides the earlier: hence >=.
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, fields[2])
    return best


def refuse_network_file_system(path: Path, mounts: str | None = None) -> None:
    """Check that `path` lies on a local file system.

    Args:
        mounts: text of the mount table; None reads the machine's (a machine without one is not checked).

    Raises:
        StoreError: it lies on a network file system.
    """
    if mounts is None:
        if not MOUNTS.exists():
            return
        mounts = MOUNTS.read_text()
    point, kind = file_system_of(path.resolve(), mounts)
    if kind in NETWORK_TYPES:
        raise StoreError(
            f"run directory {path} lies on {kind} (mounted at {point}); the store needs a local disk, because its "
            "write-ahead log relies on shared memory and locks that a network file system does not keep after a "
            "crash: put the run on a local disk and copy it when it has ended"
        )
