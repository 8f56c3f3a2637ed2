"""A simulated step as a Chrome trace, which Perfetto (ui.perfetto.dev) opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from semel.planning.simulate import Trace

NAMES = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weights"}
COMPUTE = 0
"""Number of a device's compute stream; its communication streams follow, one an axis."""


def chrome_trace(trace: Trace, most: int = 200_000) -> dict[str, Any]:
    """The trace event format's object (times in microseconds): a process a device (that is, a stage), a thread for its
    computation and one for each axis that it communicates over, a counter of memory. ``most``: events of one device's
    streams; of longer steps the first are kept, and "otherData" says so."""
    axes = sorted({one.axis for one in trace.table})
    events: list[dict[str, Any]] = []
    for device in range(trace.schedule.devices):
        events.append(_named("process_name", device, COMPUTE, f"stage {device}"))
        events.append(_named("thread_name", device, COMPUTE, "compute"))
        events += [_named("thread_name", device, number, axis) for number, axis in enumerate(axes, COMPUTE + 1)]
    cut = 0
    for stream in (_operations(trace), _transfers(trace, axes)):
        of_device = np.zeros(trace.schedule.devices, np.int64)
        for event in sorted(stream, key=lambda event: event["ts"]):
            of_device[event["pid"]] += 1
            if of_device[event["pid"]] <= most:
                events.append(event)
            else:
                cut += 1
    for device in range(trace.schedule.devices):
        times, held = trace.memory(device)
        events += [{"name": "memory", "ph": "C", "pid": device, "ts": moment * 1e6, "args": {"bytes": size}}
                   for moment, size in zip(times[:most].tolist(), held[:most].tolist(), strict=True)]
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"schedule": trace.schedule.name, "seconds": trace.seconds, "events left out": cut}}


def write_chrome_trace(trace: Trace, path: Path | str) -> None:
    Path(path).write_text(json.dumps(chrome_trace(trace)))


def _named(what: str, device: int, stream: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": device, "tid": stream, "args": {"name": name}}


def _operations(trace: Trace) -> Iterator[dict[str, Any]]:
    for device, op, start, end in trace.ops:
        yield {"name": str(op), "cat": NAMES[op.kind], "ph": "X", "pid": device, "tid": COMPUTE, "ts": start * 1e6,
               "dur": (end - start) * 1e6, "args": {"micro-batch": op.microbatch, "virtual stage": op.chunk,
                                                    "kind": NAMES[op.kind]}}


def _transfers(trace: Trace, axes: list[str]) -> Iterator[dict[str, Any]]:
    for one in trace.transfers:
        yield {"name": f"{one.axis} {one.collective}" + (f" {one.op}" if one.op else ""), "cat": one.level or "latency",
               "ph": "X", "pid": one.device, "tid": COMPUTE + 1 + axes.index(one.axis), "ts": one.start * 1e6,
               "dur": (one.end - one.start) * 1e6, "args": {"level": one.level, "bytes": one.bytes}}
