"""Where it is trained: devices, and the tree of network levels over them. Read from TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

from semel.planning.curves import Curve
from semel.planning.files import Origin

LIGHT = 5e-9
"""Seconds a metre of fibre, one way: the speed of light over a refractive index of about 1.5."""


@dataclass(frozen=True)
class Device:
    """One accelerator."""

    name: str
    peak: Mapping[str, float]
    """dtype -> dense FLOP/s of matrix products."""
    memory: float
    """Bytes."""
    memory_bandwidth: float
    """Bytes/s."""
    matmul: Curve
    """Size of a matrix product (harmonic mean of its three dimensions) -> share of the peak."""
    attention: Curve
    """Sequence length -> share of the peak that a fused attention kernel reaches."""
    vector: float
    """Share of the memory bandwidth that element-wise kernels reach."""
    kernel: float
    """Seconds a kernel costs beside its work (launch, tail)."""
    reserved: float
    """Bytes that a job cannot use: context, communication buffers, fragmentation."""
    reached: Mapping[str, float] = field(default_factory=dict)
    """dtype -> share of ``matmul`` and ``attention``, which are microbenchmarks, that training reaches: the one number
    that ``calibrate.fit_reached`` fits to published step times. 1 for a dtype that is not there."""
    power: float = 0.0
    """Watts at work, with its share of the host."""
    price: float = 0.0
    """Dollars an hour."""


@dataclass(frozen=True)
class Technology:
    """How bytes travel on a level. The closed forms are in ``semel.planning.network``."""

    name: str
    routing: str = "spraying"
    """``ecmp`` (flows hashed to paths), ``spraying`` or ``adaptive`` (packets over all paths), ``circuit``."""
    efficiency: float = 1.0
    """Share of the bandwidth left after headers and reordering, without collisions."""
    paths: int = 1
    """Equal-cost paths that flows are hashed to."""
    queue_pairs: int = 1
    """Flows a device opens to a peer at a short distance."""
    most_queue_pairs: int = 0
    """Up to so many over long links, as bandwidth x delay asks for; 0 = they do not scale with distance."""
    segment: float = 2.0**20
    """Bytes of one message on a queue pair."""
    outstanding: int = 128
    """Messages in flight a queue pair; with ``segment`` the window of a flow."""
    buffer: float = 0.0
    """Bytes of switch buffer a port: deep or shallow. 0 = does not limit."""
    lossless: bool = True
    """Flow control by credits or pauses, whose headroom of bandwidth x delay must fit the buffer. Else packets are
    lost, and sent again."""
    retransmit: str = "selective"
    """``selective`` or ``go-back-n``: what a lost packet costs on a lossy transport."""
    collective: str = "ring"
    """``ring``, ``tree``, ``hierarchical`` or ``in-network``: the algorithm of collectives across this level."""
    concurrent: int = 1
    """Messages of an all-to-all under way at once from a device."""
    reconfiguration: float = 0.0
    """Seconds to point optical circuits elsewhere, paid when one step uses a level for more than one pattern."""
    price: float = 0.0
    """Dollars an hour a device, on top of the device's own."""


@dataclass(frozen=True)
class Level:
    """A level of the tree: joins ``count`` units of the level below (devices, below the first)."""

    name: str
    count: int
    bandwidth: float
    """Bytes/s each way of a device, or of a whole unit of the level below where ``sharing`` is ``unit``."""
    latency: float
    """Seconds one way, with the way through the levels below, without ``distance``."""
    oversubscription: float = 1.0
    """2.8 = all devices together have 1/2.8 of their bandwidth across this level."""
    sharing: str = "device"
    loss: float = 0.0
    """Share of packets lost."""
    distance: float = 0.0
    """Metres between two units, adding ``LIGHT`` a metre to the latency."""
    domain: bool = False
    """A domain of its own (NVLink): traffic of outer levels does not pass its links."""
    messages: Curve = field(default_factory=lambda: Curve.flat(1.0))
    """Bytes of a message -> share of the bandwidth."""
    egress: float = 0.0
    """Dollars a byte that leaves a unit of the level below."""
    technologies: tuple[Technology, ...] = (Technology("default"),)

    @property
    def delay(self) -> float:
        """Seconds one way."""
        return self.latency + self.distance * LIGHT

    def technology(self, name: str | None = None) -> Technology:
        """The technology of that name; without one, the first. KeyError names what there is."""
        if name is None:
            return self.technologies[0]
        for each in self.technologies:
            if each.name == name:
                return each
        known = ", ".join(each.name for each in self.technologies)
        raise KeyError(f"level {self.name!r} has no network technology {name!r}; there are: {known}")


@dataclass(frozen=True)
class Unit:
    """One member of the outermost level, such as a building: so many devices of one kind."""

    name: str
    devices: int
    device: Device


@dataclass(frozen=True)
class Cluster:
    """Devices under a tree of levels, innermost first. Units of the outermost level may differ, in count and device."""

    name: str
    description: str
    levels: tuple[Level, ...]
    units: tuple[Unit, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    """Path of a coefficient (``levels.zone.bandwidth``, ``devices.h100.vector``) -> where it comes from."""

    @cached_property
    def devices(self) -> int:
        return sum(unit.devices for unit in self.units)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices in a unit of each level; of the outermost level's members the smallest counts."""
        sizes, product = [], 1
        for level in self.levels[:-1]:
            product *= level.count
            sizes.append(product)
        if sizes:
            sizes[-1] = min(sizes[-1], *(unit.devices for unit in self.units))
        return (*sizes, self.devices)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Position of each unit's first device, counted in order, and behind the last one."""
        return (0, *accumulate(unit.devices for unit in self.units))

    @cached_property
    def uniform(self) -> bool:
        """Whether all units have the same device."""
        return all(unit.device is self.units[0].device for unit in self.units)

    @property
    def device(self) -> Device:
        """The device of the first unit; all of them in a uniform cluster."""
        return self.units[0].device

    @property
    def assumed(self) -> tuple[str, ...]:
        """Paths of the coefficients that are guesses; ``scaled`` moves one."""
        return tuple(path for path, origin in self.origins.items() if origin.assumed)

    def level(self, name: str) -> Level:
        for each in self.levels:
            if each.name == name:
                return each
        raise KeyError(f"cluster {self.name!r} has no level {name!r}; it has: {', '.join(x.name for x in self.levels)}")

    def change(self, path: str, value: Any) -> Cluster:
        """The cluster with one coefficient replaced: ``levels.<name>.<field>``, ``devices.<name>.<field>`` or
        ``levels.<name>.technologies.<name>.<field>``. KeyError for a path that is not there."""
        parts = path.split(".")
        if parts[0] == "levels" and len(parts) >= 3:
            level = self.level(parts[1])
            if parts[2] == "technologies" and len(parts) == 5:
                chosen = level.technology(parts[3])
                changed = _replace(chosen, parts[4], value, path)
                level = replace(level, technologies=tuple(changed if t is chosen else t for t in level.technologies))
            elif len(parts) == 3:
                level = _replace(level, parts[2], value, path)
            else:
                raise KeyError(f"{path}: no such coefficient")
            return replace(self, levels=tuple(level if x.name == level.name else x for x in self.levels))
        if parts[0] == "devices" and len(parts) in (3, 4):
            if not any(unit.device.name == parts[1] for unit in self.units):
                raise KeyError(f"{path}: cluster {self.name!r} has no device {parts[1]!r}")
            changed_devices: dict[int, Device] = {}  # units with one device keep having one
            for device in (unit.device for unit in self.units):
                if device.name == parts[1] and id(device) not in changed_devices:
                    new = value if len(parts) == 3 else {**getattr(device, parts[2], {}), parts[3]: value}
                    changed_devices[id(device)] = _replace(device, parts[2], new, path)
            return replace(self, units=tuple(replace(unit, device=changed_devices.get(id(unit.device), unit.device))
                                             for unit in self.units))
        raise KeyError(f"{path}: no such coefficient; paths begin with levels. or devices.")

    def value(self, path: str) -> Any:
        """The coefficient at a path, in base units."""
        parts = path.split(".")
        if parts[0] == "levels":
            found: Any = self.level(parts[1])
            parts = parts[2:]
            if parts[0] == "technologies":
                found, parts = found.technology(parts[1]), parts[2:]
        else:
            found = next((unit.device for unit in self.units if unit.device.name == parts[1]), None)
            parts = parts[2:]
        for part in parts:
            found = found[part] if isinstance(found, Mapping) else getattr(found, part)
        return found

    def scaled(self, path: str, factor: float) -> Cluster:
        """One coefficient times ``factor``: for sensitivity. Shares stay at most 1, oversubscription at least 1."""
        old, name = self.value(path), path.rsplit(".", 1)[1]
        new: Any
        if isinstance(old, Curve):
            new = old.scaled(factor)
        elif isinstance(old, bool) or not isinstance(old, (int, float)):
            raise ValueError(f"{path}: {old!r} cannot be scaled")
        elif isinstance(old, int):
            new = max(1, round(old * factor))
        elif name in ("efficiency", "vector", "loss"):
            new = min(1.0, old * factor)
        elif name == "oversubscription":
            new = max(1.0, old * factor)
        else:
            new = old * factor
        return self.change(path, new)


def _replace(what: Any, name: str, value: Any, path: str) -> Any:
    if not hasattr(what, name):
        raise KeyError(f"{path}: no such coefficient")
    return replace(what, **{name: value})
