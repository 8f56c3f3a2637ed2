"""How long a step takes, in closed form: what a search prunes by, before events refine the best."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from semel.planning.layout import Layout, placement
from semel.planning.memory import Memory, by_stage, in_flight
from semel.planning.workload import Chunk, Transfer, Workload

SPLIT = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v", "greedy")
"""Schedules that run the two halves of a backward apart."""
LOCAL_STEPS = 50
"""Steps between two exchanges of a local-update schedule (``schedules.LOCAL_STEPS``)."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of one step, and where they go."""

    seconds: float
    lower: float
    """No schedule of this workload is faster: compute and transfers in line, the way to each stage and back, and the
    bytes of each link over its rate."""
    compute: float
    """Of the busiest device."""
    bubble: float
    """Fill and drain of the pipeline, and waiting for activations in between."""
    exposed: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(axis, level) -> seconds that nothing hides, on the busiest device; the level is the transfer's slowest."""
    memory: tuple[Memory, ...] = ()
    """Of each pipeline stage."""
    mfu: float = 0.0
    """Model FLOPs over what all devices could do in ``seconds``."""


@dataclass
class _Times:
    """A chunk and micro-batch: seconds of forward and backward with what is exposed, and without what may hide."""

    busy: float
    """Of both, in the steady state of the schedule."""
    forward: float
    backward: float
    weight: float
    """The part of ``backward`` that a split schedule may defer."""
    least_forward: float
    least_backward: float
    least_weight: float
    exposed: dict[tuple[str, str], float]
    start: float
    end: float
    """Transfers once a step."""
    tail: float
    """The longest part of ``end`` that begins when the last backward ends."""
    replicas: tuple[float, float]
    """Of ``start`` and ``end``, what is over dp."""
    start_hidden: bool
    end_hidden: bool
    send: float
    blocks: float
    """``send`` where it is in line: the device waits for it."""
    loads: list[tuple[str, float, float]]
    """(link, bytes a micro-batch, bytes a step)."""


def alone(transfer: Transfer, links: Mapping[str, float]) -> tuple[float, str]:
    """(seconds of one transfer with all its links to itself, its slowest link)."""
    longest, level = 0.0, ""
    for name, size in transfer.loads:
        took = size / links[name]
        if took > longest:
            longest, level = took, name
    return transfer.latency + longest, level


def estimate(work: Workload, layout: Layout) -> Estimate:
    """Closed form of a step.

    p stages, m micro-batches, t a device's seconds for one micro-batch: m P + fill, where the period P is t of the
    slowest device, or the way of an activation from a stage to the end and back over the micro-batches that the
    schedule lets be under way there, whichever is longer. Without communication that is (m + p - 1) t for GPipe and
    1F1B, m t + (p - 1) t / v interleaved (arXiv 2104.04473, section 2.2), m t + (p - 1) (F + B - 2 W) for ZB-H1
    (arXiv 2401.10241, table 2) and (p - 1) (F + 2 B - 3 W) of idle time for DualPipeV, B the full backward of a chunk.
    """
    p, m, v = work.stages, work.microbatches, layout.chunks
    where = placement(layout.schedule, p, v)
    kind = "paired" if layout.schedule == "dualpipe_v" else "split" if layout.schedule in SPLIT else "whole"
    known: dict[int, _Times] = {}
    times: list[_Times] = []
    held: list[list[int]] = [[] for _ in range(p)]
    for index, chunk in enumerate(work.chunks):
        found = known.get(id(chunk))
        if found is None:
            found = known[id(chunk)] = _times(chunk, work.links, kind)
        times.append(found)
        held[where[index]].append(index)
    kinds: dict[tuple[int, ...], _Device] = {}  # inner devices are alike
    devices: list[_Device] = []
    for indices in held:
        key = tuple([id(work.chunks[index]) for index in indices]
                    + [id(work.chunks[index - 1]) if index and times[index - 1].blocks else 0 for index in indices])
        if key not in kinds:
            kinds[key] = _device(work, layout, times, indices)
        devices.append(kinds[key])
    slowest = max(range(p), key=lambda device: devices[device].busy)
    busiest = devices[slowest]
    period = max(busiest.busy, _round_trip(times, layout, p, m, v, where))
    start = max(device.start for device in kinds.values())
    end = max(device.end for device in kinds.values())
    updates = max(device.update for device in kinds.values())
    lower = max(_lower(times, layout.schedule, where, p, m, devices), max(device.links for device in kinds.values()))
    seconds = max(lower, start + _fill(times, layout.schedule, p, slowest) + m * period + end + updates)
    exposed: dict[tuple[str, str], float] = {}
    for index in held[slowest]:
        for key_of, value in times[index].exposed.items():
            exposed[key_of] = exposed.get(key_of, 0.0) + m * value
    for shown, phase in ((start, "start"), (end, "end")):
        if shown > 0:
            for key_of, part in _shares(work, phase).items():
                exposed[key_of] = exposed.get(key_of, 0.0) + shown * part
    compute = m * busiest.compute + updates
    return Estimate(seconds, lower, compute, max(0.0, seconds - compute - sum(exposed.values())), exposed,
                    by_stage(work, layout), work.flops / (seconds * work.peak_flops) if seconds else 0.0)


@dataclass(frozen=True)
class _Device:
    """A device of the pipeline: seconds of one micro-batch over all its chunks, and of what is once a step."""

    busy: float
    least: float
    late: float
    """Of ``least``, what a split schedule may defer."""
    compute: float
    start: float
    end: float
    update: float
    links: float
    """Bytes of a step over the rate of its busiest link."""


def _device(work: Workload, layout: Layout, times: list[_Times], indices: list[int]) -> _Device:
    mine, chunks = [times[index] for index in indices], [work.chunks[index] for index in indices]
    start, end = sum(each.start for each in mine), sum(each.end for each in mine)
    once, tail = 1.0, max(each.tail for each in mine)
    if layout.schedule == "local":  # what replicas exchange, they exchange every so many steps
        once = 1.0 / LOCAL_STEPS
        start -= (1 - once) * sum(each.replicas[0] for each in mine)
        end -= (1 - once) * sum(each.replicas[1] for each in mine)
        tail = min(tail, end)
    if all(each.start_hidden for each in mine):  # beside one micro-batch
        start = max(0.0, start - sum(each.forward for each in mine))
    if all(each.end_hidden for each in mine):
        end = max(tail, end - sum(each.backward for each in mine))
    loads: dict[str, float] = {}
    for each in mine:
        for name, often, once_a_step in each.loads:
            loads[name] = loads.get(name, 0.0) + often * work.microbatches + once_a_step * once
    return _Device(
        sum(each.busy + each.blocks for each in mine) + sum(times[index - 1].blocks for index in indices if index),
        sum(each.least_forward + each.least_backward for each in mine), sum(each.least_weight for each in mine),
        sum(chunk.forward + chunk.backward_input + chunk.backward_weight for chunk in chunks), start, end,
        sum(chunk.update for chunk in chunks),
        max((size / work.links[name] for name, size in loads.items()), default=0.0))


_KNOWN: dict[tuple[int, int, str], tuple[Chunk, Mapping[str, float], _Times]] = {}


def _times(chunk: Chunk, links: Mapping[str, float], kind: str) -> _Times:
    """Remembered: a search meets the same chunks under many schedules. ``kind``: backwards ``whole``, ``split`` in two,
    or ``paired`` with forwards."""
    key = (id(chunk), id(links), kind)
    found = _KNOWN.get(key)
    if found is None:
        if len(_KNOWN) > 50_000:
            _KNOWN.clear()
        found = _KNOWN[key] = (chunk, links, _measure(chunk, links, kind))
    return found[2]


def _measure(chunk: Chunk, links: Mapping[str, float], kind: str) -> _Times:
    line = {"forward": 0.0, "backward": 0.0, "weight": 0.0}
    beside = {"forward": 0.0, "backward": 0.0, "any": 0.0}
    start = end = tail = longest = 0.0
    start_hidden = end_hidden = True
    replicas = [0.0, 0.0]
    parts: list[tuple[str, tuple[str, str], float]] = []
    for transfer in chunk.transfers:
        took, level = alone(transfer, links)
        took *= transfer.count
        phase = transfer.phase
        if phase in ("start", "end") and transfer.axis == "dp":
            replicas[phase == "end"] += took
        if phase == "start":
            start += took
            start_hidden = start_hidden and transfer.hidden
        elif phase == "end":
            end += took
            tail = max(tail, took / transfer.count)
            end_hidden = end_hidden and transfer.hidden
        elif transfer.hidden or kind == "paired":  # a forward and a backward side by side hide each other's transfers
            where = "any" if transfer.axis == "fsdp" or kind == "paired" else phase
            where = "backward" if where == "weight" else where
            if transfer.axis == "fsdp":  # fetched ahead: the latency of one hides behind the bytes of another
                longest = max(longest, took)
                took -= transfer.count * transfer.latency
            beside[where] += took
            parts.append((where, (transfer.axis, level), took))
            if not transfer.hidden:
                line[phase] += took
        else:
            line[phase] += took
            parts.append(("", (transfer.axis, level), took))
    forward, backward = chunk.forward, chunk.backward_input + chunk.backward_weight
    over = {"forward": max(0.0, beside["forward"] - forward), "backward": max(0.0, beside["backward"] - backward),
            "any": max(0.0, max(beside["any"], longest) - forward - backward)}
    exposed: dict[tuple[str, str], float] = {}
    for where, key, took in parts:
        shown = took if not where else took * over[where] / beside[where] if beside[where] else 0.0
        if shown > 0:
            exposed[key] = exposed.get(key, 0.0) + shown
    weight = chunk.backward_weight + line["weight"] if kind != "whole" else 0.0
    in_forward, in_backward = line["forward"], line["backward"] + line["weight"]
    busy = forward + backward + sum(over.values()) + (in_forward + in_backward if kind != "paired" else 0.0)
    least = (forward, backward, chunk.backward_weight) if kind == "paired" else (
        forward + in_forward, backward + in_backward, weight)
    send = alone(chunk.send, links)[0] if chunk.send is not None else 0.0
    often: dict[str, float] = {}
    once: dict[str, float] = {}
    for transfer in chunk.transfers:
        into = once if transfer.phase in ("start", "end") else often
        for name, size in transfer.loads:
            into[name] = into.get(name, 0.0) + size * transfer.count
    return _Times(busy, forward + in_forward + over["forward"], backward + in_backward + over["backward"], weight,
                  *least, exposed, start, end, tail, (replicas[0], replicas[1]), start_hidden, end_hidden, send,
                  send if chunk.send is not None and not chunk.send.hidden else 0.0,
                  [(name, often.get(name, 0.0), once.get(name, 0.0)) for name in {**often, **once}])


def _round_trip(times: list[_Times], layout: Layout, p: int, m: int, v: int, where: tuple[int, ...]) -> float:
    """Longest over chunks of (from its forward to its backward) / (micro-batches under way there)."""
    if len(times) == 1 or layout.schedule in ("gpipe", "greedy") or all(each.send == 0 for each in times):
        return 0.0
    held: dict[int, list[int]] = {}
    longest, way = 0.0, 0.0
    for index in range(len(times) - 1, -1, -1):
        each, device = times[index], where[index]
        way += each.forward + each.backward - each.weight + 2 * each.send
        counts = held.get(device)
        if counts is None:
            counts = held[device] = list(_under_way(layout.schedule, p, m, v, device))
        under_way = counts[index // p]
        if under_way < m:
            longest = max(longest, way / max(1, under_way))
    return longest


def _under_way(schedule: str, p: int, m: int, v: int, device: int) -> tuple[int, ...]:
    """Micro-batches between their forward and their backward for the input: memory holds more where weights wait."""
    if schedule == "zb_h1":
        return in_flight("1f1b", p, m, v, device)
    if schedule == "zb_h2":
        return (min(m, 2 * (p - device) - 1),)
    return in_flight(schedule, p, m, v, device)


def _fill(times: list[_Times], schedule: str, p: int, slowest: int) -> float:
    """Seconds in which the slowest device has nothing to do yet, or no more."""
    first = times[:p]
    hops = 2 * sum(each.send for each in first[:-1])
    others = [each for index, each in enumerate(first) if index != slowest]
    f, b, w = (sum(getattr(each, name) for each in others) for name in ("forward", "backward", "weight"))
    if schedule in ("zb_h1", "greedy"):
        idle = f + b - 2 * w
    elif schedule in ("zb_h2", "zb_v"):
        idle = f + b - 3 * w
    elif schedule == "dualpipe_v":
        idle = f + 2 * b - 3 * w
    else:
        idle = f + b
    return max(0.0, idle) + hops


def _shares(work: Workload, phase: str) -> dict[tuple[str, str], float]:
    """(axis, level) -> share of the seconds of transfers of ``phase``, of all chunks."""
    parts: dict[tuple[str, str], float] = {}
    for chunk in {id(each): each for each in work.chunks}.values():
        for transfer in chunk.transfers:
            if transfer.phase == phase:
                took, level = alone(transfer, work.links)
                parts[transfer.axis, level] = parts.get((transfer.axis, level), 0.0) + took * transfer.count
    total = sum(parts.values())
    return {key: value / total for key, value in parts.items()} if total else {}


def _lower(times: list[_Times], schedule: str, where: tuple[int, ...], p: int, m: int, devices: list[_Device]) -> float:
    """Over devices: the way to its first chunk, all its work, and the way back from there of the last micro-batch."""
    longest, to, back = 0.0, 0.0, 0.0
    split = schedule in SPLIT
    for each, device in zip(times[:p], where[:p], strict=True):  # the first p chunks lie on the p devices, in order
        mine = devices[device]
        after = m * mine.least - (m * mine.late if split else 0.0)
        longest = max(longest, to + m * mine.least, to + after + back)
        to += each.least_forward + each.send
        back += each.least_backward - each.least_weight + each.send
    return longest
