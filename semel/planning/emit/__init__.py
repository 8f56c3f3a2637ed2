"""Launch configurations of the systems that run a plan: ``emit(plan, "torchtitan", folder)``.

Every system gets what it can take: its own options, the order of ranks over devices (``device_mesh.json``), and the
schedule as a CSV file where the runtime reads one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.planning.job import Job
    from semel.planning.options import Options
    from semel.planning.plan import Plan

SYSTEMS = {"torchtitan": "torchtitan", "megatron": "megatron", "torchrec": "torchrec", "semel": "own"}
"""System -> module of this package."""

KINDS = {"torchtitan": "transformer", "megatron": "transformer", "torchrec": "recommender", "semel": "recommender"}
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "megatron": {"schedules": ("1f1b", "interleaved")}, "semel": {"axes": ("dp", "table")},
    "torchrec": {"axes": ("dp", "table")},
    "torchtitan": {"schedules": ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "dualpipe_v", "greedy")}}
"""Of the options of a search, what a system can run."""


def runnable(system: str, job: Job, options: Options) -> Options:
    """The part of a search's options that ``system`` can run. ValueError for another system, job or choice."""
    if system not in SYSTEMS:
        raise ValueError(f"unknown system {system!r} to emit for; there are: {', '.join(SYSTEMS)}")
    if job.kind != KINDS[system]:
        fitting = ", ".join(name for name, kind in KINDS.items() if kind == job.kind)
        raise ValueError(f"{system} is for {KINDS[system]}s, job {job.name!r} is a {job.kind}: emit for {fitting}")
    narrowed: dict[str, tuple[str, ...]] = {}
    for name, known in RUNS[system].items():
        narrowed[name] = tuple(each for each in getattr(options, name) if each in known)
        if not narrowed[name]:
            raise ValueError(f"{system} runs {name} {', '.join(known)}, the search allows "
                             f"{', '.join(getattr(options, name))}")
    return replace(options, **narrowed)  # type: ignore[arg-type]


def emit(plan: Plan, system: str, folder: str | Path) -> list[Path]:
    """Write the files with which ``system`` runs ``plan`` into ``folder`` (made if missing) and return them.

    Raises ValueError for an unknown system, and for a plan that the system cannot run, with what it can.
    """
    if system not in SYSTEMS:
        raise ValueError(f"unknown system {system!r} to emit for; there are: {', '.join(SYSTEMS)}")
    files: Callable[[Plan], dict[str, str]] = import_module(f"semel.planning.emit.{SYSTEMS[system]}").files
    texts = files(plan)  # all of them, before one is written
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
