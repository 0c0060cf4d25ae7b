"""Writes the steps of a run as TensorBoard's event files. Needs the package `tensorboard`, and no TensorFlow."""

import time
from pathlib import Path
from typing import Any

import numpy as np
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.plugins.histogram import metadata as of_histograms
from tensorboard.plugins.scalar import metadata as of_scalars
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.util import tensor_util

from orchestrator.exporters.tracker_tags import STEPS, Points, meaning_of

events: Any = event_pb2
summaries: Any = summary_pb2
protos: Any = tensor_pb2
types: Any = types_pb2
tensors: Any = tensor_util
histogram_metadata: Any = of_histograms
scalar_metadata: Any = of_scalars
make_writer: Any = EventFileWriter


class TensorBoardTracker:
    """Event files in `RUN/tensorboard`; `tensorboard --logdir runs` shows all runs. A step is one event, on disk when
    it is taken."""

    def __init__(self, directory: Path) -> None:
        self._writer = make_writer(str(directory))
        self._known: set[str] = set()
        self._begun = False

    def take(self, points: Points) -> None:
        """One point a curve. A run that goes on takes back what earlier files say of the first step and of those after
        it."""
        if not self._begun and points.series == STEPS:
            self._begun = True
            start = events.SessionLog(status=events.SessionLog.START)
            self._writer.add_event(events.Event(wall_time=time.time(), step=points.step, session_log=start))
        summary = summaries.Summary()
        for tag, value in points.numbers.items():
            # Written out: tensor_util takes several times as long for one number.
            number = protos.TensorProto(dtype=types.DT_FLOAT, float_val=(value,))
            self._add(summary, tag, number, scalar_metadata.create_summary_metadata)
        for tag, bars in points.bars.items():
            # [buckets, 3]: left edge, right edge, count
            table = np.array([bars.edges[:-1], bars.edges[1:], bars.counts], dtype=np.float64).T
            self._add(summary, tag, tensors.make_tensor_proto(table), histogram_metadata.create_summary_metadata)
        self._writer.add_event(events.Event(wall_time=time.time(), step=points.step, summary=summary))
        self._writer.flush()

    def _add(self, summary: Any, tag: str, tensor: Any, metadata: Any) -> None:  # noqa: ANN401
        """The first point of a curve comes with kind and meaning, which TensorBoard keeps from there."""
        first = None if tag in self._known else metadata(None, meaning_of(tag))
        self._known.add(tag)
        summary.value.add(tag=tag, tensor=tensor, metadata=first)

    def close(self) -> None:
        self._writer.close()
