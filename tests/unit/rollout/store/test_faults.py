"""A full disk, a read-only directory, a network file system, a kill: a clear error, and nothing that was acknowledged
is lost."""

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.builders import BASE, build_dispatch, build_group
from support.paths import ROOT

from rollout.errors import StoreError
from rollout.store.sqlite.filesystem import file_system_of, refuse_network_file_system
from rollout.store.sqlite.reader import open_reader
from rollout.store.sqlite.store import SqliteStore
from rollout.types.codec import decode, encode
from rollout.types.dispatch import Dispatch
from rollout.types.prompts import PromptCursor
from rollout.types.trajectory import EncodedGroup

MOUNTS = """/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/fast xfs rw 0 0
me@host: /mnt/my\\040data fuse.sshfs rw 0 0
tmpfs /srv tmpfs rw 0 0
server:/srv /srv cifs rw 0 0
"""


def groups(dispatches: list[Dispatch], num_tokens: int = 8) -> list[EncodedGroup]:
    return [encode(build_group(d, spans=((BASE, num_tokens),))) for d in dispatches]


def numbers(run_dir: Path) -> list[int]:
    return [json.loads(line)["number"] for line in (run_dir / "events.jsonl").read_text().splitlines()]


def opened(run_dir: Path, dispatched: int) -> tuple[SqliteStore, list[Dispatch]]:
    store = SqliteStore(run_dir)
    store.recover(None)
    dispatches = [build_dispatch(number) for number in range(dispatched)]
    store.dispatch(1, dispatches, PromptCursor(index=dispatched))
    return store, dispatches


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/runs/a", "ext4"),
        ("/home/me/run", "nfs4"),
        ("/home/fast/run", "xfs"),
        ("/homes/me", "ext4"),
        ("/mnt/my data/run", "fuse.sshfs"),
        ("/srv/run", "cifs"),
    ],
)
def test_the_mount_that_holds_a_path_is_the_longest_and_latest(path: str, kind: str) -> None:
    assert file_system_of(Path(path), MOUNTS)[1] == kind


def test_a_network_file_system_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nfs4 \(mounted at .*relies on shared memory"):
        refuse_network_file_system(tmp_path, f"server:/x {tmp_path.resolve()} nfs4 rw 0 0\n")
    refuse_network_file_system(tmp_path, "/dev/vda / ext4 rw 0 0\n")


def test_a_missing_run_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="create it first"):
        SqliteStore(tmp_path / "nowhere")


def test_a_directory_that_cannot_be_written_is_named() -> None:
    with pytest.raises(StoreError, match="not writable"):
        SqliteStore(Path("/proc/self"))


def test_a_file_that_is_not_a_store_is_named(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(StoreError, match="not a store"):
        SqliteStore(tmp_path)


def test_a_full_database_refuses_and_changes_nothing(tmp_path: Path) -> None:
    store, dispatches = opened(tmp_path, 1)
    connection = store._database.connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    before = store.counts()
    many = [build_dispatch(number) for number in range(1, 2000)]
    with pytest.raises(StoreError, match="the disk is full: free some space"):
        store.dispatch(1, many, PromptCursor(index=2000))
    with closing(open_reader(tmp_path)) as reader:
        assert store.counts() == before == reader.counts()
    connection.execute("PRAGMA max_page_count = 100000")
    assert store.dispatch(1, many, PromptCursor(index=2000)).total == 2000
    assert store.put(groups(dispatches)) == ("d-0",)
    assert numbers(tmp_path) == list(range(1, len(numbers(tmp_path)) + 1))


def test_a_full_disk_below_the_segments_refuses_the_whole_put(tmp_path: Path) -> None:
    store, dispatches = opened(tmp_path, 3)
    store.put(groups(dispatches[:1]))
    large = groups(dispatches[1:], num_tokens=400_000)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 1024 * 1024, hard))
    try:
        with pytest.raises(StoreError, match="see to the disk's space"):
            store.put(large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.counts().ready == 1
    assert store.put(large) == ("d-1", "d-2")
    leased = store.lease(1, ["d-0", "d-1", "d-2"])
    assert [decode(payload).dispatch_id for payload in leased.payloads] == ["d-0", "d-1", "d-2"]


def test_an_export_that_cannot_be_written_lags_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export = tmp_path / "events.jsonl"
    export.symlink_to("/dev/full")

    store, dispatches = opened(tmp_path, 2)
    assert store.put(groups(dispatches)) == ("d-0", "d-1")
    assert "lags behind the store" in caplog.text
    store.close()
    export.unlink()
    store = SqliteStore(tmp_path)
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]
    assert store.counts().ready == 2


@pytest.mark.parametrize("cut", [0, 1, 2, 40, 200, 10**6])
@pytest.mark.parametrize("junk", [b"", b"\0" * 100, b'{"number":99'])
def test_a_torn_export_is_mended_from_the_store(tmp_path: Path, cut: int, junk: bytes) -> None:
    store, _ = opened(tmp_path, 5)
    store.close()
    export = tmp_path / "events.jsonl"
    whole = export.read_bytes()
    export.write_bytes(whole[: max(0, len(whole) - cut)] + junk)
    SqliteStore(tmp_path)
    assert export.read_bytes() == whole


def test_a_segment_ends_at_its_size_and_a_reopened_store_starts_another(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, segment_bytes=1000)
    store.recover(None)
    dispatches = [build_dispatch(number) for number in range(4)]
    store.dispatch(1, dispatches, PromptCursor(index=4))
    for dispatch in dispatches[:3]:
        store.put(groups([dispatch]))
    store = SqliteStore(tmp_path)
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == ["segment-000001.bin", "segment-000002.bin"]
    store.put(groups(dispatches[3:]))
    assert (tmp_path / "tokens" / "segment-000003.bin").exists()


def test_durability_machine_syncs_and_serves_alike(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path, "machine")
    assert store._database.connection.execute("PRAGMA synchronous").fetchone() == (2,)
    store.recover(None)
    dispatch = build_dispatch()
    store.dispatch(1, [dispatch], PromptCursor(index=1))
    assert store.put(groups([dispatch])) == ("d-0",)
    store.close()


WRITER = """
import sys
from pathlib import Path
from support.builders import build_dispatch, build_group
from rollout.types.codec import encode
from rollout.types.prompts import PromptCursor
from rollout.store.sqlite.store import SqliteStore

def main():
    store = SqliteStore(Path(sys.argv[1]))
    store.recover(None)
    number = 0
    while True:
        dispatches = [build_dispatch(number + i) for i in range(3)]
        store.dispatch(1, dispatches, PromptCursor(index=number + 3))
        taken = store.put([encode(build_group(d, seed=int(d.dispatch_id[2:]))) for d in dispatches])
        print(*taken, flush=True)
        number += 3

main()
"""


@pytest.mark.parametrize("batches", [1, 40])
def test_whatever_was_acknowledged_survives_kill_9(tmp_path: Path, batches: int) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert writer.stdout is not None
    acknowledged = [name for _ in range(batches) for name in writer.stdout.readline().split()]
    writer.send_signal(signal.SIGKILL)
    acknowledged += writer.stdout.read().rpartition("\n")[0].split()
    writer.wait(timeout=30)
    writer.stdout.close()
    assert len(acknowledged) >= 3 * batches

    recovery = SqliteStore(tmp_path).recover(None)
    ready = {header.dispatch_id for header in recovery.ready}
    assert ready >= set(acknowledged)
    reader = open_reader(tmp_path)
    for name in acknowledged:
        group = reader.read_group(name)
        assert group is not None
        assert (
            group.trajectories[0].token_ids.tolist()
            == build_group(build_dispatch(0), seed=int(name[2:])).trajectories[0].token_ids.tolist()
        )
    reader.close()
    counts = recovery.counts
    assert counts.total == counts.ready + sum(n for _, n in counts.failed) == recovery.next_dispatch
    assert numbers(tmp_path) == list(range(1, len(numbers(tmp_path)) + 1))
