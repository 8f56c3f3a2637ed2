"""Workload x schedule as the arrays that ``streams`` runs on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from semel.planning import streams
from semel.planning.schedules import KINDS, Schedule
from semel.planning.workload import Transfer, Workload

KINDS_OF = {"forward": "F", "backward": "BI", "weight": "BW"}
"""Phase of a transfer -> kinds of operations that have it."""
WEIGHT_AXES = ("dp", "fsdp")
"""They move weights and gradients: fetched ahead, or trailing. Others move what the computation itself reads."""


def seconds_of(transfer: Transfer, work: Workload) -> float:
    """On free links, all its parts."""
    slowest = max((size / work.links[name] for name, size in transfer.loads), default=0.0)
    return transfer.count * (transfer.latency + slowest)


def level_of(transfer: Transfer, work: Workload) -> str:
    """The link that takes longest: what the transfer's time is booked under. "" for one that loads none."""
    return max(transfer.loads, key=lambda load: (load[1] / work.links[load[0]], load[0]), default=("", 0.0))[0]


def role(transfer: Transfer) -> int:
    """Where in a step or operation a transfer takes place (``streams``). Raises ValueError for an unknown phase."""
    if transfer.phase == "start":
        return streams.AT_START if transfer.hidden else streams.AT_START_IN_LINE
    if transfer.phase == "end":
        return streams.AT_END if transfer.hidden else streams.AT_END_IN_LINE
    if transfer.phase not in KINDS_OF:
        raise ValueError(f"no phase of a step is called {transfer.phase!r}: use one of "
                         f"{', '.join([*KINDS_OF, 'start', 'end'])}")
    if not transfer.hidden:
        return streams.IN_LINE
    if transfer.axis not in WEIGHT_AXES:
        return streams.BESIDE
    return streams.BEFORE if transfer.collective == "all_gather" else streams.AFTER


def computation(work: Workload) -> np.ndarray:
    """[chunks, 4] seconds by kind."""
    return np.array([[one.forward, one.backward_input + one.backward_weight, one.backward_input, one.backward_weight]
                     for one in work.chunks], np.float64)


def updates(work: Workload, plan: Schedule) -> np.ndarray:
    """[devices] seconds of the optimizer, after all else of the step."""
    return np.bincount(plan.placement, [chunk.update for chunk in work.chunks], plan.devices)


def table(work: Workload, plan: Schedule) -> tuple[list[Transfer], dict[tuple[int, int, int], list[int]], list[int]]:
    """(transfers, (chunk, kind, role) -> which of them in order, send of each chunk or -1). Under a schedule that
    exchanges every so many steps, what data-parallel replicas exchange at start and end is that much less a step."""
    found: list[Transfer] = []
    lists: dict[tuple[int, int, int], list[int]] = {}
    sends = []
    for number, chunk in enumerate(work.chunks):
        for transfer in chunk.transfers:
            if plan.sync_every > 1 and transfer.axis == "dp" and transfer.phase in ("start", "end"):
                transfer = replace(transfer, latency=transfer.latency / plan.sync_every, loads=tuple(
                    (name, size / plan.sync_every) for name, size in transfer.loads))
            at = role(transfer)
            for kind in KINDS_OF.get(transfer.phase, "F"):
                lists.setdefault((number, KINDS.index(kind), at), []).append(len(found))
            found.append(transfer)
        last = number == len(work.chunks) - 1
        if chunk.send is None or last or plan.placement[number] == plan.placement[number + 1]:
            sends.append(-1)
        else:
            sends.append(len(found))
            found.append(chunk.send)
    return found, lists, sends


def program(work: Workload, plan: Schedule) -> tuple[list[Transfer], list[tuple[str, str]], streams.Program]:
    """(transfers, (axis, level) of each key, the step). Raises ValueError for what no step can have."""
    names = list(work.links)
    for chunk in {id(chunk): chunk for chunk in work.chunks}.values():
        for transfer in (*chunk.transfers, *([chunk.send] if chunk.send else [])):
            _check(transfer, names)
    found, by_op, sends = table(work, plan)
    keys: dict[tuple[str, str], int] = {}
    transfers: list[tuple] = []
    loads: list[tuple[int, float]] = []
    rows: dict[int, tuple] = {}  # inner chunks are alike
    for one in found:
        if id(one) not in rows:
            key = keys.setdefault((one.axis, level_of(one, work)), len(keys))
            loads += [(names.index(name), one.count * size / work.links[name]) for name, size in one.loads]
            rows[id(one)] = (seconds_of(one, work), one.count, key, len(loads) - len(one.loads), len(loads))
        transfers.append(rows[id(one)])
    listed: list[int] = []
    lists = [0]
    for at in np.ndindex(len(work.chunks), 4, streams.ROLES):
        listed.extend(by_op.get(at, ()))
        lists.append(len(listed))

    operations = np.zeros(len(plan.kinds), streams.OPERATION)
    operations["kind"], operations["microbatch"], operations["chunk"] = plan.kinds, plan.microbatches, plan.chunks
    operations["width"] = 1
    operations["width"][plan.pairs] = 2
    devices = np.zeros(plan.devices, streams.DEVICE)
    devices["first"] = devices["at"] = devices["before"] = plan.offsets[:-1]
    devices["stop"] = plan.offsets[1:]
    chunks = np.zeros(len(work.chunks), streams.CHUNK)
    chunks["device"], chunks["send"] = plan.placement, sends
    chunks["send_in_line"] = [send >= 0 and not found[send].hidden for send in sends]
    arrival = np.full((2, len(chunks), plan.count), -1.0)
    arrival[0, 0] = 0.0
    each = np.diff(lists).reshape(len(chunks), 4, streams.ROLES)
    room = int(each[:, :, :streams.AT_END].sum(2)[plan.chunks, plan.kinds].sum() + len(plan.kinds)
               + each[:, :, streams.AT_END:].sum())
    return found, list(keys), streams.Program(
        operations, devices, chunks, computation(work), np.array(transfers, streams.TRANSFER),
        np.array(loads, streams.LOAD), np.array(lists), np.array(listed, np.int64),
        np.zeros((plan.devices, max(len(names), 1))), arrival, np.zeros_like(arrival),
        np.zeros((plan.devices, max(len(keys), 1))), np.zeros(room, streams.RECORD), np.zeros(1, np.int64))


def _check(transfer: Transfer, links: list[str]) -> None:
    unknown = next((name for name, _ in transfer.loads if name not in links), None)
    if unknown is not None:
        raise ValueError(f"a transfer over {transfer.axis} loads {unknown!r}, the workload's links are "
                         f"{', '.join(links)}")
    if not (transfer.count >= 1 and transfer.latency >= 0 and all(size >= 0 for _, size in transfer.loads)):
        raise ValueError(f"a transfer takes count >= 1, latency and bytes >= 0, got {transfer}")
