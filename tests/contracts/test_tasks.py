"""The tasks of docs/builder/tasks.md, each done with a dummy through the files that the page names, and no other."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from contracts.source_tree import ROOMS, ROOT

PAGE = ROOT / "docs" / "builder" / "tasks.md"
CONFIG = "rollout/config.py"
RUNNABLE = ("an algorithm", "an engine", "an environment", "a reward", "a store")
"""Kinds of which a new one takes three files at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A change: new files, and lines put before (or in place of) lines that are there."""

    name: str
    files: dict[str, str] = field(default_factory=dict[str, str])
    edits: tuple[tuple[str, str, str], ...] = ()
    """(file, what stands there, what stands there afterwards)."""
    check: str
    """A program that ends well only where the dummy takes part."""

    @property
    def touched(self) -> set[str]:
        return {*self.files, *(file for file, _, _ in self.edits)}


def member(config: str, union: str, name: str, base: str, kind: str) -> tuple[tuple[str, str, str], ...]:
    """A section of `kind` in the module `config`, added to the union `union`."""
    section = f'class {name}({base}):\n    """A dummy."""\n\n    type: Literal["dummy"] = "dummy"\n\n\n'
    if kind == "alone":
        old = f"{union} = Sqlite{union}\n"
        return ((config, old, f'{section}{union} = Annotated[Sqlite{union} | {name}, Field(discriminator="type")]\n'),)
    old = f"{union} = Annotated["
    return ((config, old, f"{section}{union} = Annotated[{name} | "),)


TASKS = (
    Task(
        name="an algorithm",
        files={
            "trainer/algorithms/dummy.py": (
                "from trainer.algorithms.surrogate import ClippedSurrogate\n\n\n"
                "class Dummy(ClippedSurrogate):\n"
                '    name = "dummy"\n\n'
                "    def compared(self, rewards):\n        return rewards * 7\n"
            )
        },
        edits=(
            *member("trainer/config/trainer.py", "AlgorithmConfig", "DummyConfig", "GroupRelativeSection", "union"),
            (
                "trainer/algorithms/registry.py",
                "        case GrpoConfig():\n",
                "        case DummyConfig():\n            return Dummy(config)\n        case GrpoConfig():\n",
            ),
            (
                "trainer/algorithms/registry.py",
                "from trainer.algorithms.gspo",
                "from trainer.algorithms.dummy import Dummy\nfrom trainer.config.trainer import DummyConfig\n"
                "from trainer.algorithms.gspo",
            ),
        ),
        check="""
from orchestrator.config import parse_config
from trainer.algorithms.registry import build_algorithm
config = parse_config({"trainer": {"algorithm": {"type": "dummy"}}}, "test").trainer.algorithm
assert build_algorithm(config).name == "dummy"
""",
    ),
    Task(
        name="an engine",
        files={
            "rollout/engines/dummy/__init__.py": '"""A dummy."""\n',
            "rollout/engines/dummy/engine.py": (
                "class DummyEngine:\n    def __init__(self, config, identity):\n        self.identity = identity\n"
            ),
        },
        edits=(
            *member(CONFIG, "EngineConfig", "DummyEngineConfig", "EngineSection", "union"),
            (
                "rollout/engines/registry.py",
                "    ScriptedConfig: (",
                '    DummyEngineConfig: ("rollout.engines.dummy.engine", "DummyEngine"),\n    ScriptedConfig: (',
            ),
            (
                "rollout/engines/registry.py",
                "from rollout.config import EngineConfig,",
                "from rollout.config import DummyEngineConfig\nfrom rollout.config import EngineConfig,",
            ),
        ),
        check="""
from orchestrator.config import parse_config
from rollout.engines.registry import build_engine
assert build_engine(parse_config({"engine": {"type": "dummy"}}, "test").engine, "identity").identity == "identity"
""",
    ),
    Task(
        name="an environment",
        files={
            "rollout/environments/dummy.py": (
                "def source(config, seed, require_answer, held_out):\n    return f'source {seed}'\n\n\n"
                "def envs(config, prompt, tokenizer, count):\n    return ('env',) * count\n"
            )
        },
        edits=(
            *member(CONFIG, "EnvironmentConfig", "DummyEnvironmentConfig", "Section", "union"),
            (
                "rollout/environments/registry.py",
                "    ArithmeticConfig: (",
                "    DummyEnvironmentConfig: (dummy.source, dummy.envs),\n    ArithmeticConfig: (",
            ),
            (
                "rollout/environments/registry.py",
                "from rollout.environments import arithmetic,",
                "from rollout.config import DummyEnvironmentConfig\nfrom rollout.environments import dummy\n"
                "from rollout.environments import arithmetic,",
            ),
        ),
        check="""
from orchestrator.config import parse_config
from rollout.environments.registry import build_envs, build_source
config = parse_config({"environment": {"type": "dummy"}}, "test").environment
assert build_source(config, 7) == "source 7"
assert build_envs(config, None, None, 2) == ("env", "env")
""",
    ),
    Task(
        name="a reward",
        files={
            "rollout/rewards/dummy.py": (
                "class DummyReward:\n    def __init__(self, config):\n        self.config = config\n\n"
                "    def __call__(self, prompt, completion, trajectory):\n        return 7.0\n"
            )
        },
        edits=(
            *member(CONFIG, "RewardConfig", "DummyRewardConfig", "Section", "union"),
            (
                "rollout/rewards/registry.py",
                "    ExactMatchConfig: (",
                "    DummyRewardConfig: (DummyReward, False),\n    ExactMatchConfig: (",
            ),
            (
                "rollout/rewards/registry.py",
                "from rollout.rewards.exact_match",
                "from rollout.config import DummyRewardConfig\nfrom rollout.rewards.dummy import DummyReward\n"
                "from rollout.rewards.exact_match",
            ),
        ),
        check="""
from orchestrator.config import parse_config
from rollout.rewards.registry import build_reward, needs_answer
config = parse_config({"reward": {"type": "dummy"}}, "test").reward
assert build_reward(config)(None, "", None) == 7.0 and not needs_answer(config)
""",
    ),
    Task(
        name="a metric and an alert",
        edits=(
            (
                "orchestrator/metrics/system.py",
                "    wall_seconds = column(",
                '    dummy_updates = column("updates", lambda now: now.weight_updates)\n    """A dummy."""\n'
                "    wall_seconds = column(",
            ),
            (
                "deploy/grafana/panels.py",
                "DIAGNOSIS = Panel(",
                'DUMMY = lines("A dummy", "dummy_updates")\nDIAGNOSIS = Panel(',
            ),
            (
                "deploy/prometheus/rules/alerts.yml",
                "      - alert: ConcordDoctorCritical\n",
                "      - alert: ConcordDummy\n        expr: concord_dummy_updates > 7\n"
                "      - alert: ConcordDoctorCritical\n",
            ),
            ("docs/user/runbook.md", "### ConcordDoctorCritical", "### ConcordDummy\n\n### ConcordDoctorCritical"),
        ),
        check="""
import sys
import yaml
sys.path.insert(0, "deploy/grafana")
from panels import DUMMY
from orchestrator.metrics.catalogue import COLUMNS, DECLARED
rules = yaml.safe_load(open("deploy/prometheus/rules/alerts.yml"))["groups"][0]["rules"]
assert "dummy_updates" in COLUMNS
assert DUMMY.queries[0][0] == rules[0]["expr"].split()[0] == DECLARED["concord_dummy_updates"].name
""",
    ),
    Task(
        name="a rule of the doctor",
        edits=(
            (
                "orchestrator/metrics/causes.py",
                '    TRAIN_EVAL_OVERLAP = "train_eval_overlap"\n',
                '    DUMMY = "dummy"\n    TRAIN_EVAL_OVERLAP = "train_eval_overlap"\n',
            ),
            (
                "orchestrator/doctor/advice.py",
                "    Cause.TRAIN_EVAL_OVERLAP: ",
                '    Cause.DUMMY: _advice("Do this.", "Do not do that."),\n    Cause.TRAIN_EVAL_OVERLAP: ',
            ),
            (
                "orchestrator/doctor/diagnosis.py",
                "    Cause.TRAIN_EVAL_OVERLAP: ",
                "    Cause.DUMMY: inputs.dummy,\n    Cause.TRAIN_EVAL_OVERLAP: ",
            ),
            (
                "orchestrator/doctor/rules/inputs.py",
                "def train_eval_overlap(",
                "def dummy(record):\n"
                '    return Finding(Cause.DUMMY, Severity.WARN, 1, "a dummy", ())\n\n\n'
                "def train_eval_overlap(",
            ),
        ),
        check="""
from orchestrator.doctor.diagnosis import diagnose
from orchestrator.run_dir.record import record_of_rows
found = diagnose(record_of_rows([{"step": float(step)} for step in range(1, 41)]))
assert "dummy" in [str(finding.cause) for finding in found.findings], found
""",
    ),
    Task(
        name="a store",
        files={
            "rollout/store/dummy/__init__.py": '"""A dummy."""\n',
            "rollout/store/dummy/store.py": (
                "class DummyStore:\n    def __init__(self, run_dir):\n        self.run_dir = run_dir\n"
            ),
        },
        edits=(
            *member(CONFIG, "StoreConfig", "DummyStoreConfig", "Section", "alone"),
            (
                "rollout/store/registry.py",
                "    SqliteStoreConfig: lambda",
                "    DummyStoreConfig: lambda run_dir, config: DummyStore(run_dir),\n    SqliteStoreConfig: lambda",
            ),
            (
                "rollout/store/registry.py",
                "from rollout.store.sqlite.store",
                "from rollout.config import DummyStoreConfig\nfrom rollout.store.dummy.store import DummyStore\n"
                "from rollout.store.sqlite.store",
            ),
        ),
        check="""
from orchestrator.config import parse_config
from rollout.store.registry import build_store
assert build_store("here", parse_config({"store": {"type": "dummy"}}, "test").store).run_dir == "here"
""",
    ),
    Task(
        name="a command",
        files={"orchestrator/commands/dummy.py": "def dummy_of(run_dir):\n    print(f'a dummy of {run_dir}')\n"},
        edits=(
            (
                "orchestrator/commands/main.py",
                "@app.command()\ndef tiny(",
                "@app.command()\ndef dummy(run_dir: Path) -> None:\n"
                "    from orchestrator.commands.dummy import dummy_of\n\n    dummy_of(run_dir)\n\n\n"
                "@app.command()\ndef tiny(",
            ),
        ),
        check="""
from typer.testing import CliRunner
from orchestrator.commands.main import app
assert CliRunner().invoke(app, ["dummy", "here"]).output == "a dummy of here\\n"
""",
    ),
    Task(
        name="another admission formula",
        edits=(
            (
                "orchestrator/dispatch/staleness.py",
                "    return max(0, min(window.max_concurrent - running,",
                "    return 7 + max(0, min(window.max_concurrent - running,",
            ),
        ),
        check="""
from types import SimpleNamespace
from orchestrator.dispatch.admission import Admission
from orchestrator.dispatch.staleness import Window
from rollout.types.dispatch import Counts
book = SimpleNamespace(counts=Counts(), pool=SimpleNamespace(running={}), trained_after=lambda version: 0)
weights = SimpleNamespace(policy=SimpleNamespace(version=0))
window = Window(max_staleness=0, batch_groups=2, max_concurrent=2)
made = Admission(book=book, window=window, source=None, weights=weights, replicas=None, failures=None,
                 group_size=1, submit_deadline_s=1.0)
assert made.capacity() == 9
""",
    ),
    Task(
        name="another way for weights",
        edits=(
            ("rollout/types/weights.py", '    DISK = "disk"\n', '    DUMMY = "dummy"\n    DISK = "disk"\n'),
            ("trainer/config/trainer.py", 'transport: Literal["disk", ', 'transport: Literal["dummy", "disk", '),
            (
                "orchestrator/weight_sync/transfer.py",
                "    if config.weights.transport == Transport.DISK:\n",
                "    if config.weights.transport == Transport.DUMMY:\n        return 'dummy'\n"
                "    if config.weights.transport == Transport.DISK:\n",
            ),
        ),
        check="""
from orchestrator.config import parse_config
from orchestrator.weight_sync.transfer import build_transfer
gpus = {"engine": {"type": "vllm", "num_gpus": 1}, "trainer": {"num_gpus": 1}}
assert build_transfer(parse_config({**gpus, "weights": {"transport": "dummy"}}, "test"), None) == "dummy"
""",
    ),
)


def rows() -> dict[str, str]:
    """Task -> its row, as the page has it."""
    found = re.findall(r"^\| \*\*(.+?)\*\* \| .+? \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return dict(found)


def test_every_task_of_the_page_is_done_here():
    assert list(rows()) == [task.name for task in TASKS]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_touches_only_what_its_row_names(task: Task):
    named = re.findall(r"`([\w./]+)`", rows()[task.name])
    places = [name for name in named if "/" in name]
    strange = [file for file in task.touched if not any(file.startswith(place) for place in places)]
    if task.name == "a rule of the doctor":
        strange = [file for file in strange if not file.startswith("orchestrator/doctor/rules/")]
    assert not strange


@pytest.mark.parametrize("task", [task for task in TASKS if task.name in RUNNABLE], ids=lambda task: task.name)
def test_a_new_one_takes_three_files_at_most(task: Task):
    assert len([file for file in task.touched if not file.endswith("__init__.py")]) <= 3


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_dummy_takes_part(task: Task, tmp_path: Path):
    for room in (*ROOMS, "deploy", "docs"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in task.files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for name, old, new in task.edits:
        text = (tmp_path / name).read_text()
        assert old in text, f"{name} has no {old!r}"
        (tmp_path / name).write_text(text.replace(old, new, 1))
    done = subprocess.run(
        [sys.executable, "-c", task.check],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
