"""What a run writes while it trains: lines of ``metrics.jsonl``, TensorBoard curves and the timeline, on rank 0."""

from __future__ import annotations

import json
from typing import Any

from semel.training.ranks import Ranks
from semel.training.run import Run
from semel.training.timeline import Timeline, write_trace


class Curves:
    """Called by all ranks; those that do not write do nothing. A context: closes what it opened."""

    def __init__(self, run: Run, ranks: Ranks) -> None:
        self.run, self.ranks = run, ranks
        self._writer: Any = None

    def __enter__(self) -> Curves:
        if self.ranks.rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.run.path / "tensorboard"))
        return self

    def __exit__(self, *_: Any) -> None:
        if self._writer is not None:
            self._writer.close()

    def record(self, line: dict[str, Any]) -> None:
        """A line with ``kind``, ``step`` and figures; those of ``seconds`` go under ``KIND/seconds/``."""
        if self._writer is None:
            return
        with open(self.run.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        figures = {name: value for name, value in line.items() if name not in ("kind", "step", "epoch")}
        seconds = figures.pop("seconds", {})
        figures |= {f"seconds/{name}": value for name, value in seconds.items()}
        for name, value in figures.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(f"{line['kind']}/{name}", value, line["step"])

    def trace(self, timeline: Timeline) -> None:
        """``timeline.json``: the last steps of all ranks."""
        events = self.ranks.gather(timeline.events())
        if self.ranks.rank == 0:
            write_trace(self.run.path / "timeline.json", [event for part in events for event in part])

    def forget_after(self, step: int) -> None:
        """Lines written after a checkpoint belong to steps that are taken again."""
        if self.ranks.rank == 0:
            kept = [line for line in self.run.metrics if line["step"] <= step]
            (self.run.path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
