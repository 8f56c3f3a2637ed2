"""Clusters from TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from semel.planning.cluster import Cluster, Device, Level, Technology, Unit
from semel.planning.curves import Curve
from semel.planning.files import Origin, Section, open_section
from semel.planning.units import BYTES


def load_cluster(source: str | Path | Mapping) -> Cluster:
    """A cluster from a TOML file, a ready file's name (``ready("clusters")``), or a parsed mapping.

    Raises FileNotFoundError for what is neither, ValueError for unknown fields, missing units, and counts that do not
    fit each other.
    """
    section = open_section("clusters", source)
    origins = section.origins
    levels = tuple(_level(each) for each in section.sections("levels"))
    if not levels:
        section.fail("levels", "a cluster needs at least one [[levels]]")
    names = [level.name for level in levels]
    for name in names:
        if names.count(name) > 1:
            section.fail("levels", f"two levels are called {name!r}")
    devices: dict[str, Device] = {}
    units = _units(section, levels, devices)
    cluster = Cluster(section.text("name", section.stem), section.text("description", ""), levels, units, origins)
    if "devices" in section:
        devices_said = section.count("devices")
        if devices_said != cluster.devices:
            even = len({unit.devices for unit in units}) == 1
            counts = " x ".join(str(level.count) for level in levels)
            parts = " + ".join(str(unit.devices) for unit in units)
            section.fail("devices", f"says {devices_said}, but the {'levels' if even else 'units'} give "
                         f"{counts if even else parts} = {cluster.devices}")
    section.done()
    return cluster


def load_device(source: str | Path | Mapping, origins: dict[str, Origin] | None = None) -> Device:
    """A device from a TOML file, a ready file's name, or a parsed mapping. Its origins are added to ``origins``."""
    section = open_section("devices", source)
    device = _device(section)
    if origins is not None:
        origins.update({f"devices.{device.name}.{key}": origin for key, origin in section.origins.items()})
    return device


def load_technology(name: str, origins: dict[str, Origin] | None = None, where: str = "") -> Technology:
    """A ready network technology. Its origins are added to ``origins`` under ``where``."""
    section = open_section("technologies", name)
    technology = _technology(section)
    if origins is not None:
        origins.update({f"{where}.{key}": origin for key, origin in section.origins.items()})
    return technology


def _curve(section: Section, key: str, default: float | None = None) -> Curve:
    raw = section.take(key) if default is None else section.take(key, default)
    try:
        return Curve.flat(float(raw)) if isinstance(raw, (int, float)) else Curve.of(raw)
    except (TypeError, ValueError) as error:
        section.fail(key, f"expected a share or a list of [size, share]: {error}")


def _device(section: Section) -> Device:
    peak = section.section("peak")
    rates = {dtype: peak.quantity(dtype, "rate") for dtype in BYTES if dtype in peak}
    peak.done()
    if not rates:
        section.fail("peak", f"give FLOP/s of at least one dtype: {', '.join(BYTES)}")
    part = section.section("reached")
    reached = {dtype: part.number(dtype, least=0.05, most=2.0) for dtype in BYTES if dtype in part}
    part.done()
    device = Device(
        name=section.text("name", section.stem), peak=rates, memory=section.quantity("memory", "size"),
        memory_bandwidth=section.quantity("memory_bandwidth", "bandwidth"), matmul=_curve(section, "matmul"),
        attention=_curve(section, "attention"), vector=section.number("vector", least=0.01, most=1.0),
        kernel=section.quantity("kernel", "time"), reserved=section.quantity("reserved", "size"),
        reached=reached,
        power=section.quantity("power", "power", 0.0), price=section.quantity("price", "price", 0.0))
    section.text("description", "")
    section.done()
    return device


def _technology(section: Section) -> Technology:
    technology = Technology(
        name=section.text("name", section.stem),
        routing=section.choice("routing", ("ecmp", "spraying", "adaptive", "circuit"), "spraying"),
        efficiency=section.number("efficiency", 1.0, least=0.01, most=1.0), paths=section.count("paths", 1),
        queue_pairs=section.count("queue_pairs", 1), most_queue_pairs=section.count("most_queue_pairs", 0, least=0),
        segment=section.quantity("segment", "size", 2.0**20), outstanding=section.count("outstanding", 128),
        buffer=section.quantity("buffer", "size", 0.0), lossless=section.flag("lossless", True),
        retransmit=section.choice("retransmit", ("selective", "go-back-n"), "selective"),
        collective=section.choice("collective", ("ring", "tree", "hierarchical", "in-network"), "ring"),
        concurrent=section.count("concurrent", 1),
        reconfiguration=section.quantity("reconfiguration", "time", 0.0),
        price=section.quantity("price", "price", 0.0))
    section.text("description", "")
    section.done()
    return technology


def _level(section: Section) -> Level:
    name = section.text("name")
    technologies: list[Technology] = []
    named = section.take("technologies", [])
    if not isinstance(named, list):
        section.fail("technologies", f"expected a list of names or tables, got {named!r}")
    for index, each in enumerate(named):
        where = f"{section.path}.technologies"
        if isinstance(each, str):
            try:
                technologies.append(load_technology(each, section.origins, f"{where}.{each}"))
            except FileNotFoundError as error:
                section.fail("technologies", str(error))
        elif isinstance(each, dict):
            called = str(each.get("name", index))
            technologies.append(_technology(Section({"name": called, **each}, section.place, called,
                                                    f"{where}.{called}", section.origins)))
        else:
            section.fail("technologies", f"expected names or tables, got {each!r}")
    names = [technology.name for technology in technologies]
    if len(set(names)) < len(names):
        section.fail("technologies", f"names must differ, got {', '.join(names)}")
    level = Level(
        name=name, count=section.count("count"), bandwidth=section.quantity("bandwidth", "bandwidth"),
        latency=section.quantity("latency", "time"),
        oversubscription=section.number("oversubscription", 1.0, least=1.0),
        sharing=section.choice("sharing", ("device", "unit"), "device"),
        loss=section.number("loss", 0.0, most=0.5), distance=section.quantity("distance", "distance", 0.0),
        domain=section.flag("domain", False), messages=_curve(section, "messages", 1.0),
        egress=section.quantity("egress", "egress", 0.0), technologies=tuple(technologies) or (Technology("default"),))
    if not level.bandwidth > 0:
        section.fail("bandwidth", "must be above 0")
    section.done()
    return level


def _units(section: Section, levels: tuple[Level, ...], known: dict[str, Device]) -> tuple[Unit, ...]:
    inside = 1
    for level in levels[:-1]:
        inside *= level.count
    own = section.take("device", None)
    default = None if own is None else _device_of(section, "device", own, known)
    tables = section.sections("units")
    if not tables:
        if default is None:
            section.fail("device", "is missing; name a ready device or give a table [device]")
        return tuple(Unit(f"{levels[-1].name}-{index}", inside, default) for index in range(levels[-1].count))
    units = []
    for index, each in enumerate(tables):
        repeat = each.count("repeat", 1)
        device = _device_of(each, "device", each.take("device"), known) if "device" in each else default
        if device is None:
            each.fail("device", "is missing, here and in the cluster")
        count = each.count("devices", inside)
        if count > inside:
            each.fail("devices", f"{count} is more than the {inside} that the levels inside {levels[-1].name!r} give")
        if len(levels) > 1 and count % levels[0].count:
            each.fail("devices", f"{count} is no multiple of the {levels[0].count} devices of a {levels[0].name}")
        name = each.text("name", f"{levels[-1].name}-{index}")
        each.done()
        units += [Unit(name if repeat == 1 else f"{name}-{k}", count, device) for k in range(repeat)]
    if len(units) != levels[-1].count:
        section.fail("units", f"{len(units)} are given, but level {levels[-1].name!r} joins {levels[-1].count}")
    return tuple(units)


def _device_of(section: Section, key: str, raw: object, known: dict[str, Device]) -> Device:
    if isinstance(raw, str):
        if raw not in known:
            try:
                known[raw] = load_device(raw, section.origins)
            except FileNotFoundError as error:
                section.fail(key, str(error))
        return known[raw]
    if not isinstance(raw, dict):
        section.fail(key, f"expected a device's name or a table, got {raw!r}")
    base = raw.get("like")
    part = Section(dict(raw), section.place, str(raw.get("name", "device")), f"devices.{raw.get('name', 'device')}",
                   section.origins)
    if base is None:
        return _device(part)
    device = _device_of(section, key, part.text("like"), known)
    extra: dict[str, Any] = {"name": part.text("name", device.name)}
    for field_name, kind in (("memory", "size"), ("memory_bandwidth", "bandwidth"), ("kernel", "time"),
                             ("reserved", "size"), ("power", "power"), ("price", "price")):
        if field_name in part:
            extra[field_name] = part.quantity(field_name, kind)
    part.done()
    return replace(device, **extra)
