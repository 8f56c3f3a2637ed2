"""Where a step's time goes: seconds by stage, and the bubbles, in which a rank computes nothing.

``input``: the next batch was not ready. ``straggler``: this rank was done and waited for the slowest.
``exposed_embedding`` and ``exposed_gradient``: bytes were on their way and nothing was left to do. ``docs/training.md``
says how to read them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BUBBLES = ("input", "straggler", "exposed_embedding", "exposed_gradient")
KEEP = 200
"""Steps whose spans are kept for the trace."""


class Timeline:
    """Times spans of named work, in any thread, step by step.

    A span's seconds are its own: those of a span within it (a wait within a stage) count there and not here."""

    def __init__(self, rank: int = 0, keep: int = KEEP) -> None:
        self.rank = rank
        self.totals: dict[str, float] = defaultdict(float)  # of the whole run
        self._clock = time.time() - time.perf_counter()  # so that ranks of several hosts lie side by side
        self._lock = threading.Lock()
        self._local = threading.local()
        self._seconds: dict[str, float] = defaultdict(float)  # since the last step ended
        self._steps = 0
        self._began = time.perf_counter()
        self._spans: deque[list[tuple[str, str, float, float]]] = deque(maxlen=keep)
        self._open: list[tuple[str, str, float, float]] = []

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        outer = getattr(self._local, "inner", None)
        self._local.inner = 0.0  # seconds of the spans within this one
        start = time.perf_counter()
        try:
            yield
        finally:
            stop = time.perf_counter()
            own = stop - start - self._local.inner
            self._local.inner = None if outer is None else outer + stop - start
            with self._lock:
                self._seconds[name] += own
                self.totals[name] += own
                self._open.append((name, threading.current_thread().name, start, stop))

    def end_step(self) -> None:
        with self._lock:
            self._spans.append(self._open)
            self._open = []
            self._steps += 1

    def means(self) -> dict[str, float]:
        """Seconds a step of each name since the last call, and ``step``: from one step's end to the next one's."""
        now = time.perf_counter()
        with self._lock:
            steps = max(self._steps, 1)
            found = {"step": (now - self._began) / steps, **{n: s / steps for n, s in sorted(self._seconds.items())}}
            self._seconds.clear()
            self._steps, self._began = 0, now
        return found

    def events(self) -> list[dict[str, Any]]:
        """The kept spans as events of the Chrome trace format, one process a rank and one row a thread."""
        with self._lock:
            steps = [*self._spans]
        threads: dict[str, int] = {}
        events: list[dict[str, Any]] = [
            {"name": name, "cat": "bubble" if name in BUBBLES else "stage", "ph": "X", "pid": self.rank,
             "tid": threads.setdefault(thread, len(threads)), "ts": round((start + self._clock) * 1e6, 1),
             "dur": round((stop - start) * 1e6, 1), "args": {"step": number}}
            for number, spans in enumerate(steps) for name, thread, start, stop in spans]
        named: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}]
        named += [{"name": "thread_name", "ph": "M", "pid": self.rank, "tid": tid,
                   "args": {"name": thread}} for thread, tid in threads.items()]
        return named + events


def write_trace(path: Path, events: list[dict[str, Any]]) -> None:
    """Events of all ranks as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    os.replace(part, path)


def short(means: Mapping[str, float]) -> str:
    """Milliseconds of a step and of its bubbles that take more than a hundredth of it, for a line of progress."""
    whole = means.get("step", 0.0)
    if not whole:
        return ""
    bubbles = [f"{name.replace('_', ' ')} {1000 * means[name]:.0f}" for name in BUBBLES
               if means.get(name, 0.0) > 0.01 * whole]
    return f"step {1000 * whole:.0f} ms" + (f", waits: {', '.join(bubbles)}" if bubbles else "")
