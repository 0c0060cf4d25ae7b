"""What the loop itself needs of a config: the run, staleness, deadlines, and where signals go. Knows no torch, vllm or
ray."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from rollout.config import Section


class RunSection(Section):
    """The run as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Folder of the run below `dir`; None takes the config's name and the time."""
    dir: Path = Path("runs")
    """Where run folders are made; relative to the working directory."""
    seed: int = 0
    """Seed of the prompt order, of the engines' draws and of the trainer."""
    steps: PositiveInt = 100
    """Optimizer steps of the whole run, resumes included."""
    batch_groups: PositiveInt = 16
    """Groups (prompts) a step."""
    group_size: PositiveInt = 8
    """Trajectories a group."""
    deterministic: bool = False
    """Same seed, same result, bit for bit: torch or scripted engine, one rank, one thread."""


class StalenessConfig(Section):
    """How far rollout may run ahead of training."""

    max_staleness: Annotated[int, Field(ge=0)] = 2
    """eta, in optimizer steps; 0 is the synchronous loop."""
    policy: Literal["drop", "mask", "wait"] = "drop"
    """What the consumption gate does about tokens older than eta."""
    order: Literal["ready", "dispatch"] = "ready"
    """`ready`: first finished, first trained (favours short answers). `dispatch`: oldest dispatch first."""
    dispatch_window: PositiveInt = 1
    """With order `dispatch`: a step chooses among the oldest `dispatch_window` x batch unfinished groups."""
    max_concurrent_groups: PositiveInt | None = None
    """Groups in generation at once; None takes (eta + 1) x batch."""


class DeadlinesConfig(Section):
    """How long the loop waits for what before it calls it an error."""

    engine_start_s: PositiveFloat = 600.0
    """One engine replica, from its process to its first verified weights."""
    trainer_start_s: PositiveFloat = 600.0
    """Store, reward workers and trainer ranks to start, and a checkpoint to load."""
    step_s: PositiveFloat = 1800.0
    """One training step: lease, forward, backward, optimizer."""
    update_s: PositiveFloat = 300.0
    """One weight update of one replica, canary included."""
    checkpoint_s: PositiveFloat = 1800.0
    """Writing a checkpoint, or publishing weights."""
    store_s: PositiveFloat = 60.0
    """One call to the store."""
    stall_s: PositiveFloat = 600.0
    """Without a finished step for this long, the run dumps stacks, names what it waits for, and ends."""
    health_interval_s: PositiveFloat = 2.0
    """Between two health checks of a replica."""
    restart_pause_s: PositiveFloat = 1.0
    """Before a replica that could not be started is started again; twice as long each time, up to a minute."""
    shutdown_s: PositiveFloat = 10.0
    """Time for the running step and the last checkpoint, after Ctrl-C or SIGTERM."""


class ExporterConfig(Section):
    """Where Prometheus finds the signals of the run."""

    enabled: bool = True
    """Serve them over HTTP while the run lasts."""
    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` lets other machines look."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 takes a free one; the run prints it, and `summary.json` has it."""


class TrackersConfig(Section):
    """Where the signals of every step go besides. Needs the extra `trackers`."""

    tensorboard: bool = False
    """Write event files to `RUN/tensorboard`."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases: `offline` writes `RUN/wandb` for a later `wandb sync`, `online` also sends it; who you are
    comes from `wandb login`."""
    wandb_project: str = "concord"
    """Project of Weights & Biases."""
