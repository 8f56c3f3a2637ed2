"""Which device is which rank: a runtime numbers ranks in an axis order of its own, a plan lays axes over the tree."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from semel.planning.plan import Plan


def devices_of_ranks(sizes: Mapping[str, int], placed: Sequence[str], numbered: Sequence[str]) -> np.ndarray:
    """Rank -> device [ranks] int64.

    ``placed``: axes innermost first, as the plan lays them over neighbouring devices; ``numbered``: axes innermost
    first, as the runtime counts ranks. Both name each axis above 1 once. Raises ValueError where they do not.
    """
    axes = [axis for axis in placed if sizes.get(axis, 1) > 1]
    ranked = [axis for axis in numbered if sizes.get(axis, 1) > 1]
    if sorted(axes) != sorted(ranked):
        raise ValueError(f"the plan places {axes}, the runtime numbers {ranked}: they must be the same axes")
    if not axes:
        return np.zeros(1, np.int64)
    devices = np.arange(int(np.prod([sizes[axis] for axis in axes], dtype=np.int64)))
    cube = devices.reshape([sizes[axis] for axis in reversed(axes)])  # outermost first, as numpy counts
    outermost_first = list(reversed(axes))
    return cube.transpose([outermost_first.index(axis) for axis in reversed(ranked)]).reshape(-1)


def mesh_file(plan: Plan, numbered: Sequence[str], names: Mapping[str, str] | None = None) -> str:
    """``device_mesh.json``. ``names``: what the runtime calls an axis.

    ``hosts``: the order in which to list hosts (by their place in the tree of the cluster), if that is enough;
    ``devices``: rank -> device, if ranks of one host are reordered too.
    """
    layout, names = plan.layout, names or {}
    sizes = {axis: layout.size(axis) for axis in numbered}
    placed = [axis for axis in layout.order if axis in sizes]
    placed += [axis for axis in numbered if axis not in placed]
    devices = devices_of_ranks(sizes, placed, numbered)
    host = plan.cluster.levels[0].count
    straight = bool((devices == np.arange(len(devices))).all())
    by_host = devices.reshape(-1, host) if len(devices) % host == 0 else devices.reshape(1, -1)
    whole_hosts = len(devices) % host == 0 and bool(
        (by_host == by_host[:, :1] + np.arange(host)).all() and (by_host[:, 0] % host == 0).all())
    facts = {
        "axes_innermost_first": [{"axis": names.get(axis, axis), "ranks": sizes[axis]} for axis in numbered],
        "placed_innermost_first": [names.get(axis, axis) for axis in placed if sizes[axis] > 1],
        "devices_a_host": host, "in_order": straight,
    }
    if not straight and whole_hosts:
        facts["hosts"] = (by_host[:, 0] // host).tolist()
    elif not straight:
        facts["devices"] = devices.tolist()
    return json.dumps(facts, indent=1) + "\n"


def schedule_file(plan: Plan) -> str:
    """The schedule as the CSV that torch.distributed.pipelining loads."""
    import tempfile
    from pathlib import Path

    from semel.planning.schedules import write_csv

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        write_csv(plan.schedule(), path)
        return path.read_text()


def arguments(options: Mapping[str, object]) -> str:
    """One option a line, as a shell continues them; None and True leave the value out, False the option."""
    lines = []
    for name, value in options.items():
        if value is False:
            continue
        lines.append(f"  {name}" if value is None or value is True else f"  {name} {value}")
    return " \\\n".join(lines)
