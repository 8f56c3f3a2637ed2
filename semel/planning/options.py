"""What a search may choose, how it judges, and when it stops. Read from TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from semel.planning.files import Section, open_section
from semel.planning.layout import AXES

OBJECTIVES = ("time", "cost", "energy")
RECOMPUTE = ("none", "selective", "full")
PINS = (*AXES, "schedule", "chunks", "microbatch", "recompute", "order", "network")
"""What may be pinned: ranks along an axis, or a choice."""


@dataclass(frozen=True)
class Options:
    """A search. Limits count nodes (workloads that were estimated) and simulations, never seconds, so that the same
    search gives the same plans on every machine."""

    name: str = "default"
    description: str = ""
    axes: tuple[str, ...] = AXES
    """Axes that may have more than one rank."""
    schedules: tuple[str, ...] = ("1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v", "greedy")
    """Names of ``semel.planning.schedules.NAMES``. Those that change the optimization must be named to be used."""
    chunks: tuple[int, ...] = (1, 2, 4)
    """Model chunks a device that are tried, where the schedule has chunks."""
    microbatches: tuple[int, ...] = (1, 2, 4)
    """Sequences (samples) a micro-batch."""
    recompute: tuple[str, ...] = RECOMPUTE
    technologies: tuple[str, ...] = ()
    """Network technologies that may be used beside each level's first; empty = all that a level offers."""
    compress: tuple[str, ...] = ()
    """Dtypes to which gradients may be rounded across the outermost level; it changes the optimization, so none unless
    asked for."""
    overlap: tuple[str, ...] = ("dp", "fsdp", "pp")
    """Axes whose communication may hide beside compute: what the runtime can do, not a choice."""
    objective: str = "time"
    memory: float = 1.0
    """Share of a device's memory that a plan may take."""
    seconds: float = float("inf")
    """The longest step that will do."""
    pinned: Mapping[str, Any] = field(default_factory=dict)
    """``PINS`` -> value; ``order`` a list of axes, ``network`` a table level -> technology."""
    devices: tuple[int, ...] = ()
    """How many devices may be used; empty = all of the cluster."""
    nodes: int = 3_000
    """Workloads estimated at most."""
    simulations: int = 48
    """Plans simulated by events at most."""
    keep: int = 10
    """Plans returned."""

    def __post_init__(self) -> None:
        for name in ("nodes", "simulations", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"search {self.name!r}: {name} must be at least 1, got {getattr(self, name)}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"search {self.name!r}: objective {self.objective!r} is none of {', '.join(OBJECTIVES)}")
        if not 0 < self.memory <= 1:
            raise ValueError(f"search {self.name!r}: memory is a share above 0 and up to 1, got {self.memory}")
        for name in ("schedules", "chunks", "microbatches", "recompute"):
            if not getattr(self, name):
                raise ValueError(f"search {self.name!r}: {name} is empty; name at least one")


def load_search(source: str | Path | Mapping | None = None) -> Options:
    """Options from a TOML file, a ready file's name (``ready("searches")``), or a parsed mapping; None: the defaults.

    Raises FileNotFoundError for what is neither, ValueError for unknown fields (naming the nearest) and values that do
    not fit.
    """
    if source is None:
        return Options()
    section = open_section("searches", source)
    options = read_search(section)
    section.done()
    return options


def read_search(section: Section) -> Options:
    from semel.planning.schedules import NAMES

    plain: dict[str, Any] = {each.name: each.default for each in fields(Options)}
    limits, pins = section.section("limits"), section.section("pinned")
    options = Options(
        name=section.text("name", section.stem), description=section.text("description", ""),
        axes=_names(section, "axes", AXES, plain["axes"]),
        schedules=_names(section, "schedules", NAMES, plain["schedules"]),
        chunks=section.counts("chunks", plain["chunks"]),
        microbatches=section.counts("microbatches", plain["microbatches"]),
        recompute=_names(section, "recompute", RECOMPUTE, RECOMPUTE),
        technologies=_names(section, "technologies", None, ()), compress=_names(section, "compress", None, ()),
        overlap=_names(section, "overlap", AXES, plain["overlap"]),
        objective=section.choice("objective", OBJECTIVES, "time"), devices=section.counts("devices", ()),
        memory=limits.number("memory", 1.0, most=1.0), seconds=limits.quantity("step_time", "time", float("inf")),
        nodes=limits.count("nodes", plain["nodes"]), simulations=limits.count("simulations", plain["simulations"]),
        keep=section.count("keep", plain["keep"]), pinned=_pins(pins))
    limits.done()
    pins.done()
    return options


def _pins(section: Section) -> dict[str, Any]:
    from semel.planning.schedules import NAMES

    pinned: dict[str, Any] = {}
    for name in (*AXES, "chunks", "microbatch"):
        if name in section:
            pinned[name] = section.count(name)
    for name, known in (("schedule", tuple(NAMES)), ("recompute", RECOMPUTE)):
        if name in section:
            pinned[name] = section.choice(name, known)
    if "order" in section:
        pinned["order"] = _names(section, "order", AXES, ())
    if "network" in section:
        part = section.section("network")
        pinned["network"] = {level: part.text(level) for level in list(part.keys())}
        part.done()
    return pinned


def _names(section: Section, key: str, known: Any, default: tuple[str, ...]) -> tuple[str, ...]:
    """A list of names, each one of ``known`` (None: any); the nearest known name is suggested."""
    import difflib

    value = section.take(key, default)
    if not isinstance(value, (list, tuple)) or any(not isinstance(each, str) for each in value):
        section.fail(key, f"expected a list of names, got {value!r}")
    for each in value if known is not None else ():
        if each not in known:
            near = difflib.get_close_matches(each, list(known), n=1, cutoff=0.5)
            section.fail(key, f"unknown name {each!r}; " + (
                f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"))
    return tuple(value)
