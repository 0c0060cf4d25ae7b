"""`concord explain`: one trajectory with its tokens, versions, log-probs, reward and outcome; or the story of its
dispatch."""

import json
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orchestrator.commands.explain_evidence import evidence_of, show_evidence
from orchestrator.commands.explain_searches import culprit_lines
from orchestrator.commands.run import prepare_model
from orchestrator.commands.tables import say, table_of
from orchestrator.config import RunConfig
from orchestrator.run_dir.layout import RunDir, open_run_dir
from rollout.errors import UserError
from rollout.store.sqlite.reader import DispatchRecord, StoreReader, open_reader
from rollout.tokenization.tokenizer import Tokenizer, load_tokenizer
from rollout.types.trajectory import Trajectory, TrajectoryGroup
from rollout.types.weights import PolicyVersion
from trainer.types.evidence import TrajectoryEvidence


def explain_trajectory(path: Path, wanted: str) -> None:
    """Print what is known of a trajectory or of a dispatch.

    Raises:
        UserError: the run or the id does not exist.
    """
    run, config = open_run_dir(path)
    with closing(open_reader(run.path)) as reader:
        dispatch_id = reader.dispatch_of_trajectory(wanted) or wanted
        record = reader.dispatch_record(dispatch_id)
        if record is None:
            raise UserError(
                f"run {run.path} has no trajectory or dispatch {wanted!r}; ids are in events.jsonl and look like "
                "d00000012-3 (dispatch d00000012)"
            )
        _show_dispatch(record, reader)
        group = reader.read_group(dispatch_id)
        if group is None:
            say("no finished group: the store holds no tokens of this dispatch")
            return
        tokenizer = load_tokenizer(_tokenizer_dir(run, config))
        trained, evidence = record.step, evidence_of(reader, dispatch_id)
        searched, left_out = culprit_lines(run)
        for note in left_out:
            say(note)
        for index, trajectory in enumerate(group.trajectories):
            if wanted in (dispatch_id, trajectory.trajectory_id):
                found = None if evidence is None else evidence.trajectories[index]
                named = searched.get(trajectory.trajectory_id, ())
                tokens = wanted == trajectory.trajectory_id
                _show_trajectory(group, index, tokenizer, trained, found, named, tokens=tokens)


def _tokenizer_dir(run: RunDir, config: RunConfig) -> Path:
    """Published weights are whole model directories; a scripted run publishes none, and its model is where the config
    says."""
    published = sorted(path.parent for path in run.weights.glob("e*-v*/tokenizer.json"))
    return published[0] if published else prepare_model(config.model)


def _show_dispatch(record: DispatchRecord, reader: StoreReader) -> None:
    dispatch, prompt = record.dispatch, record.dispatch.prompt
    asked = prompt.text if prompt.text is not None else " | ".join(f"{m.role}: {m.content}" for m in prompt.messages)
    say(
        f"dispatch {dispatch.dispatch_id}  prompt {prompt.prompt_id} (pass {prompt.pass_index}, attempt "
        f"{dispatch.attempt}), dispatched while {dispatch.policy.key} was committed, to replica {dispatch.replica}"
    )
    say(f"asked {asked!r}, reference answer {prompt.answer!r}")
    say(f"outcome: {_outcome(record)}")
    for event in reader.events(dispatch.dispatch_id):
        rest = {k: v for k, v in event.items() if k not in ("number", "at_s", "kind", "dispatch_id")}
        say(
            f"  #{event['number']} {time.strftime('%H:%M:%S', time.gmtime(event['at_s']))} {event['kind']} "
            f"{json.dumps(rest)}"
        )
    for annotation in reader.annotations(dispatch.dispatch_id):
        say(f"  annotation {annotation.kind}: {len(annotation.payload)} bytes")


def _outcome(record: DispatchRecord) -> str:
    if record.step is not None:
        return f"trained in step {record.step.version} ({record.state})"
    return f"{record.state}({record.reason}) {record.detail}" if record.reason else str(record.state)


def _show_trajectory(
    group: TrajectoryGroup,
    index: int,
    tokenizer: Tokenizer,
    trained: PolicyVersion | None,
    evidence: TrajectoryEvidence | None,
    searches: Sequence[str],
    *,
    tokens: bool,
) -> None:
    trajectory, reward = group.trajectories[index], group.rewards[index]
    tag = trajectory.tag
    parts = "".join(f", {name} {value:g}" for name, value in reward.parts)
    spans = ", ".join(f"{s.policy.key} [{s.start}, {s.end})" for s in trajectory.version_spans)
    say(
        f"trajectory {trajectory.trajectory_id}  reward {reward.total:g}{parts}; {trajectory.num_sampled} of "
        f"{trajectory.token_ids.size} tokens sampled in {trajectory.turns} turn(s), finished by "
        f"{trajectory.finish_reason}; versions {spans}"
    )
    say(f"  {tokenizer.decode(trajectory.token_ids, skip_special_tokens=False)!r}")
    if evidence is not None:
        show_evidence(evidence)
    for line in searches:
        say(f"  {line}")
    if not tokens:
        return
    say(
        f"  sampled by {tag.engine} {tag.engine_version}, replica {tag.replica}: weights {tag.weights_dtype}, KV "
        f"{tag.kv_dtype} ({tag.kv_across_versions} across versions), log-probs {tag.logprob_semantics}, temperature "
        f"{tag.temperature:g}, top_p {tag.top_p:g}, top_k {tag.top_k}"
    )
    Console().print(_token_table(trajectory, tokenizer, trained, evidence))


def _token_table(
    trajectory: Trajectory, tokenizer: Tokenizer, trained: PolicyVersion | None, evidence: TrajectoryEvidence | None
) -> Table:
    recomputed = () if evidence is None else ("recomputed", "d_engine")
    numbers = ("position", "id", "version", "log-prob (nats)", *recomputed, "staleness when trained")
    table = table_of(*numbers[:2], "token", *numbers[2:], right=numbers)
    versions = trajectory.token_versions()
    for position, token in enumerate(trajectory.token_ids.tolist()):
        text = Text(repr(tokenizer.decode(trajectory.token_ids[position : position + 1], skip_special_tokens=False)))
        if not trajectory.sampled[position]:
            table.add_row(str(position), str(token), text, "given", *("",) * (2 + len(recomputed)))
            continue
        version = int(versions[position])
        age = "" if trained is None else str(trained.version - 1 - version)
        logged = float(trajectory.rollout_logprobs[position])
        found = _recomputed(evidence, position, logged)
        table.add_row(str(position), str(token), text, str(version), f"{logged:.6f}", *found, age)
    return table


def _recomputed(evidence: TrajectoryEvidence | None, position: int, logged: float) -> tuple[str, ...]:
    """The trainer's log-prob of a token at the version that sampled it, and its distance from the engine's."""
    if evidence is None:
        return ()
    if not evidence.scored[position]:
        return ("not scored", "")
    value = float(evidence.behaviour_logprobs[position])
    return (f"{value:.6f}", f"{value - logged:+.1e}")
