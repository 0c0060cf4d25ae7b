"""Manifests, complete-or-absent directories, checkpoints by name, and the scripted trainer: everything without
torch."""

import shutil
import subprocess
import sys
from pathlib import Path
from time import monotonic

import numpy as np
import pytest
from safetensors.numpy import save_file
from support.paths import ROOT
from support.published import verify_directory
from support.trainer.trainer_room import stored

from rollout.errors import UserError, WeightSyncError
from rollout.published.digests import manifest_digest
from rollout.published.manifest import digest_directory, read_manifest
from rollout.types.weights import PolicyVersion
from trainer.checkpointing.checkpoints import (
    STATE_NAME,
    TENSORS_NAME,
    CheckpointState,
    latest_checkpoint,
    prune_checkpoints,
    read_state,
)
from trainer.checkpointing.durable import begin_directory, complete_directory
from trainer.config.trainer import TrainerConfig
from trainer.step.scripted import ScriptedTrainer
from trainer.types.step import StepRequest
from trainer.weights.canary import canary_token_ids

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def scripted(step_s: float = 0.0) -> ScriptedTrainer:
    return ScriptedTrainer(TrainerConfig(type="scripted", scripted_step_s=step_s))


def checkpoint(parent: Path, policy: PolicyVersion) -> Path:
    directory = parent / policy.key
    scripted().save_checkpoint(directory, CheckpointState(policy=policy, seed=7, weights_digest="d" * 64))
    return directory


def test_a_manifest_comes_back_from_its_directory(tmp_path: Path):
    written = scripted().publish(V0, tmp_path / "w")
    assert written is not None
    read = read_manifest(tmp_path / "w")
    assert (read.policy, read.transport, read.location, read.tensors, read.digest, read.num_bytes) == (
        written.policy,
        written.transport,
        str(tmp_path / "w"),
        written.tensors,
        written.digest,
        written.num_bytes,
    )
    np.testing.assert_array_equal(read.canary.token_ids, written.canary.token_ids)
    np.testing.assert_array_equal(read.canary.logprobs, written.canary.logprobs)


def test_the_digest_is_over_the_bytes_in_the_file(tmp_path: Path):
    manifest = scripted().publish(V0, tmp_path / "w")
    assert manifest is not None
    assert manifest_digest(digest_directory(tmp_path / "w")) == manifest.digest
    verify_directory(manifest)


def test_one_changed_bit_is_found_and_named(tmp_path: Path):
    manifest = scripted().publish(V0, tmp_path / "w")
    assert manifest is not None
    weights = tmp_path / "w" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(WeightSyncError, match=r"1 different \(first scripted.weight\)"):
        verify_directory(manifest)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path):
    manifest = scripted().publish(V0, tmp_path / "w")
    assert manifest is not None
    save_file({"other": np.zeros(2, dtype=np.float32)}, tmp_path / "w" / "model.safetensors")
    with pytest.raises(WeightSyncError, match=r"1 missing \(first scripted.weight\), 1 not published \(first other\)"):
        verify_directory(manifest)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path):
    for name in ("a", "b"):
        save_file({"same": np.zeros(2, dtype=np.float32)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(UserError, match="in two files"):
        digest_directory(tmp_path)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[]"])
def test_a_broken_manifest_is_an_error(tmp_path: Path, content: str):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(WeightSyncError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_an_altered_manifest_is_an_error(tmp_path: Path):
    scripted().publish(V0, tmp_path / "w")
    path = tmp_path / "w" / "manifest.json"
    path.write_text(path.read_text().replace("scripted.weight", "scripted.weighs"))
    with pytest.raises(WeightSyncError, match="altered"):
        read_manifest(tmp_path / "w")


def test_a_directory_is_absent_until_it_is_complete(tmp_path: Path):
    temporary = begin_directory(tmp_path / "w")
    (temporary / "file").write_text("half")
    assert not (tmp_path / "w").exists()
    complete_directory(temporary, tmp_path / "w")
    assert (tmp_path / "w" / "file").read_text() == "half"


def test_what_a_crash_left_is_begun_anew(tmp_path: Path):
    (begin_directory(tmp_path / "w") / "old").write_text("")
    assert list(begin_directory(tmp_path / "w").iterdir()) == []


def test_a_directory_is_written_once(tmp_path: Path):
    scripted().publish(V0, tmp_path / "w")
    with pytest.raises(UserError, match="exists already"):
        scripted().publish(V0, tmp_path / "w")


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        begin_directory(tmp_path / "file" / "w")


def test_the_newest_checkpoint_is_that_of_the_newest_epoch_and_version(tmp_path: Path):
    assert latest_checkpoint(tmp_path) is None
    for policy in (PolicyVersion(1, 9), PolicyVersion(2, 4), PolicyVersion(1, 30)):
        checkpoint(tmp_path, policy)
    assert latest_checkpoint(tmp_path) == tmp_path / "e2-v4"


def test_a_broken_checkpoint_is_counted_and_a_directory_of_another_name_is_not(tmp_path: Path):
    """Which is newest is in the names; what one holds is judged by who resumes from it, so a folder that is moved away
    meanwhile is no broken one."""
    checkpoint(tmp_path, V1)
    broken = checkpoint(tmp_path, PolicyVersion(1, 9))
    (broken / TENSORS_NAME / ".metadata").unlink()
    shutil.copytree(broken, tmp_path / "e1-v30.mine")
    assert latest_checkpoint(tmp_path) == broken
    with pytest.raises(UserError, match="e1-v9 is incomplete: its tensors are missing; resume from another"):
        scripted().load_checkpoint(broken)


def test_a_checkpoint_whose_folder_is_in_the_way_is_a_user_error(tmp_path: Path):
    (tmp_path / ".partial-e1-v5").touch()
    with pytest.raises(UserError, match=r"cannot write .*e1-v5: Not a directory; free space"):
        checkpoint(tmp_path, PolicyVersion(1, 5))


def test_a_checkpoint_tells_its_state(tmp_path: Path):
    state = scripted().load_checkpoint(checkpoint(tmp_path, V1))
    assert (state.policy, state.seed, state.weights_digest) == (V1, 7, "d" * 64)


def test_a_half_written_checkpoint_is_not_seen(tmp_path: Path):
    (begin_directory(tmp_path / "e1-v5") / STATE_NAME).write_text("{}")
    checkpoint(tmp_path, V1)
    assert latest_checkpoint(tmp_path) == tmp_path / "e1-v1"


def test_a_checkpoint_without_tensors_or_state_is_an_error(tmp_path: Path):
    directory = checkpoint(tmp_path, V1)
    (directory / TENSORS_NAME / ".metadata").unlink()
    with pytest.raises(UserError, match="tensors are missing"):
        read_state(directory)
    (directory / STATE_NAME).write_text("{")
    with pytest.raises(UserError, match="broken"):
        read_state(directory)
    (directory / STATE_NAME).unlink()
    with pytest.raises(UserError, match="incomplete"):
        read_state(directory)


def test_pruning_keeps_the_newest_and_clears_what_crashes_left(tmp_path: Path):
    kept = [checkpoint(tmp_path, PolicyVersion(1, version)) for version in (20, 40, 60)][1:]
    left = begin_directory(tmp_path / "e1-v80")
    assert set(prune_checkpoints(tmp_path, 2)) == {tmp_path / "e1-v20", left}
    assert sorted(tmp_path.iterdir()) == kept


def test_the_scripted_trainer_counts_what_a_trainer_would_train_on():
    report = scripted().step(stored(lengths=(4, 2)), StepRequest(policy=V1, oldest_version=1))
    assert report.num_tokens == 3 * 2 + 3 * 1
    assert report.trained_ids == {f"d-{group}/{index}" for group in range(2) for index in range(3)}
    assert report.masked_ids == report.trained_ids
    old = scripted().step(stored(lengths=(4, 2)), StepRequest(policy=V1, oldest_version=2))
    assert (old.num_tokens, old.trained_ids) == (0, frozenset())


def test_the_scripted_step_takes_its_time():
    begun = monotonic()
    scripted(0.05).step(stored(lengths=(4,)), StepRequest(policy=V1, oldest_version=0))
    assert monotonic() - begun >= 0.05


def test_the_scripted_trainer_publishes_the_same_bytes_under_every_version(tmp_path: Path):
    trainer = scripted()
    first, second = trainer.publish(V0, tmp_path / "a"), trainer.publish(V1, tmp_path / "b")
    assert first is not None
    assert second is not None
    assert (second.policy, second.digest, second.location) == (V1, first.digest, str(tmp_path / "b"))
    for manifest in (first, second):
        verify_directory(manifest)
        assert read_manifest(Path(manifest.location)).policy == manifest.policy


def test_the_canary_holds_valid_ids_only_and_leaves_room_for_an_answer():
    for vocab_size, tokenizer_size, context in ((32, 20, None), (2, 2, 8), (1, 1, 3), (150_000, 149_000, 4096)):
        ids = canary_token_ids(vocab_size, tokenizer_size, context)
        assert ids.dtype == np.int32
        assert 0 <= ids.min() <= ids.max() < tokenizer_size
        assert 2 <= ids.size < (context or 33)
        np.testing.assert_array_equal(ids, canary_token_ids(vocab_size, tokenizer_size, context))


def test_what_the_driver_needs_of_the_trainer_loads_no_torch():
    modules = (
        "trainer.step.scripted, trainer.model.model_dir, trainer.checkpointing.checkpoints, rollout.published.manifest"
    )
    code = f"import sys, {modules}; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
