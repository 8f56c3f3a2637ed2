"""Workload x schedule -> what happens when: one device a stage stands for all that do the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from semel.planning import encoding, streams
from semel.planning.schedules import KINDS, Op, Schedule
from semel.planning.workload import Chunk, Transfer, Workload


class OpRun(NamedTuple):
    device: int
    op: Op
    start: float
    end: float


class TransferRun(NamedTuple):
    device: int
    axis: str
    level: str
    collective: str
    op: Op | None  # None: of the step
    start: float
    end: float
    bytes: float


@dataclass(frozen=True, eq=False)
class Trace:
    """One step. A device stands for all devices of its pipeline stage.

    seconds         when the last device is done
    period          between two steps if no device waits for others at their boundary (optimizer steps checked
                    afterwards, as zero-bubble schedules do; arXiv 2401.10241, section 4): the longest that one device
                    takes from its first operation to its last
    waiting, exposed   [devices] seconds for other devices' operations; (axis, level) -> [devices] seconds in which the
                    device itself waits for a transfer. They and ``busy`` add up to ``seconds``
    """

    work: Workload
    schedule: Schedule
    seconds: float
    period: float
    waiting: np.ndarray
    exposed: dict[tuple[str, str], np.ndarray]
    op_start: np.ndarray
    op_end: np.ndarray
    table: tuple[Transfer, ...]
    records: np.ndarray
    """[transfers that took place] streams.RECORD: device, op (index into the schedule; -1: of the step), transfer
    (index into the table), start, end."""

    @cached_property
    def busy(self) -> np.ndarray:
        """[devices] seconds of computation, the optimizer's with it."""
        plan = self.schedule
        each = encoding.computation(self.work)[plan.chunks, plan.kinds]
        return encoding.updates(self.work, plan) + np.array(
            [each[a:b].sum() for a, b in zip(plan.offsets[:-1], plan.offsets[1:], strict=True)])

    @property
    def bubble_share(self) -> float:
        """Of the step, mean over devices: 1 - busy / seconds."""
        return float(1 - self.busy.mean() / self.seconds) if self.seconds > 0 else 0.0

    @property
    def mfu(self) -> float:
        return self.work.flops / (self.work.peak_flops * self.seconds) if self.seconds > 0 else 0.0

    @cached_property
    def bubble(self) -> dict[Any, float]:
        """Mean seconds a device computes nothing, by cause: "fill and drain" (what the order costs with equal stages
        and no communication), "straggler" (stages that differ), and (axis, level) of exposed communication, its own and
        what others wait for in consequence. Adds up to ``seconds`` - mean ``busy``."""
        quiet = replace(self.work, chunks=tuple(replace(chunk, transfers=(), send=None) for chunk in self.work.chunks))
        without = _seconds(quiet, self.schedule) if self.table else self.seconds
        forward, backward_input, weight, update = np.mean([_durations(chunk) for chunk in quiet.chunks], 0).tolist()
        even = replace(quiet, chunks=tuple(
            replace(chunk, forward=forward, backward_input=backward_input, backward_weight=weight, update=update)
            for chunk in quiet.chunks))
        ideal = without if len({_durations(chunk) for chunk in quiet.chunks}) == 1 else min(
            _seconds(even, self.schedule), without)
        found: dict[Any, float] = {"fill and drain": ideal - float(self.busy.mean()), "straggler": without - ideal}
        local = {key: float(values.mean()) for key, values in self.exposed.items()}
        for key, value in local.items():
            if value > 0:
                found[key] = (self.seconds - without) * value / sum(local.values())
        return found

    @cached_property
    def op_device(self) -> np.ndarray:
        """[operations]"""
        return np.repeat(np.arange(self.schedule.devices), np.diff(self.schedule.offsets))

    @property
    def ops(self) -> Iterator[OpRun]:
        """Device by device, in the order in which they run."""
        flat = (op for listed in self.schedule.ops for op in listed)
        return (OpRun(*row) for row in zip(self.op_device.tolist(), flat, self.op_start.tolist(), self.op_end.tolist(),
                                           strict=True))

    @property
    def transfers(self) -> Iterator[TransferRun]:
        flat = [op for listed in self.schedule.ops for op in listed]
        for device, op, index, start, end in self.records.tolist():
            one = self.table[index]
            yield TransferRun(device, one.axis, encoding.level_of(one, self.work), one.collective,
                              None if op < 0 else flat[op], start, end, one.bytes * one.count)

    def memory(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """(seconds [n], bytes [n]): from each time on the device holds so much. Weights, gradients and optimizer all
        along; activations from a forward on until its gradients of weights are done; an operation's own while it runs.
        """
        part = slice(self.schedule.offsets[device], self.schedule.offsets[device + 1])
        kinds, chunks = self.schedule.kinds[part], self.schedule.chunks[part]
        kept, activation, peak = (np.array(values) for values in zip(*(
            (chunk.weights + chunk.gradients + chunk.optimizer, chunk.activation, chunk.peak)
            for chunk in self.work.chunks), strict=True))
        held = float(kept[np.asarray(self.schedule.placement) == device].sum())
        takes = np.where(kinds == KINDS.index("F"), activation[chunks], 0.0)
        gives = np.where((kinds == KINDS.index("B")) | (kinds == KINDS.index("W")), activation[chunks], 0.0)
        times = np.stack([self.op_start[part], self.op_end[part]], axis=1).ravel()
        steps = np.stack([takes + peak[chunks], -gives - peak[chunks]], axis=1).ravel()
        order = np.argsort(times, kind="stable")  # as listed, but where a pair's communication overlaps
        return np.concatenate([[0.0], times[order]]), held + np.concatenate([[0.0], np.cumsum(steps[order])])

    @cached_property
    def peak_memory(self) -> np.ndarray:
        """[devices] bytes."""
        return np.array([self.memory(device)[1].max() for device in range(self.schedule.devices)])

    @cached_property
    def _takes(self) -> dict[str, np.ndarray]:
        """level -> [transfers of the table] seconds of its link."""
        return {level: np.array([sum(size for name, size in one.loads if name == level) * one.count / bandwidth
                                 for one in self.table]) for level, bandwidth in self.work.links.items()}

    @cached_property
    def link_load(self) -> dict[str, np.ndarray]:
        """level -> [devices] share of the step in which its link is busy."""
        devices = self.schedule.devices
        if not self.table or self.seconds == 0:
            return {level: np.zeros(devices) for level in self.work.links}
        return {level: np.bincount(self.records["device"], takes[self.records["transfer"]], devices) / self.seconds
                for level, takes in self._takes.items()}

    def load_over_time(self, level: str, bins: int = 200) -> np.ndarray:
        """[devices, bins] share of each part of the step in which the link of ``level`` is busy; a transfer's bytes are
        spread evenly over the time that it takes."""
        found = np.zeros((self.schedule.devices, bins))
        edges = np.linspace(0, self.seconds, bins + 1)
        if not self.table or self.seconds == 0:
            return found
        takes = self._takes[level][self.records["transfer"]]
        for device in range(self.schedule.devices):
            mine = np.flatnonzero((self.records["device"] == device) & (takes > 0))
            if not len(mine):
                continue
            start, end = self.records["start"][mine], self.records["end"][mine]
            rate = takes[mine] / (end - start)
            times, slopes = np.concatenate([start, end]), np.concatenate([rate, -rate])
            order = np.argsort(times, kind="stable")
            slope = np.cumsum(slopes[order])
            carried = np.concatenate([[0.0], np.cumsum(slope[:-1] * np.diff(times[order]))])
            found[device] = np.diff(np.interp(edges, times[order], carried)) * bins / self.seconds
        return found


def simulate(work: Workload, plan: Schedule) -> Trace:
    """One step of ``work`` under ``plan``, as ``streams`` runs it. Raises ValueError where the two do not belong
    together (chunks, stages, micro-batches, names of links) or the lists cannot be followed to their end."""
    if len(plan.placement) != len(work.chunks) or plan.devices != work.stages or plan.count != work.microbatches:
        raise ValueError(
            f"{plan.name} is for {len(plan.placement)} virtual stages on {plan.devices} devices and {plan.count} "
            f"micro-batches, the workload for {len(work.chunks)} on {work.stages} and {work.microbatches}: make it "
            f"with the workload's numbers")
    table, keys, program = encoding.program(work, plan)
    if not (np.isfinite(program.seconds) & (program.seconds >= 0)).all():
        raise ValueError("computation of a chunk takes a number of seconds that is not negative")
    if not streams.run(program):
        raise ValueError(f"{plan.name} comes to a standstill: schedules.check says where")
    operations, devices = program.operations, program.devices
    devices["end"] += encoding.updates(work, plan)
    seconds = float(devices["end"].max())
    at_work = devices[devices["first"] < devices["stop"]]
    span = at_work["end"] - operations["start"][at_work["first"]]
    return Trace(work, plan, seconds, float(span.max(initial=0.0)), devices["waiting"] + (seconds - devices["end"]),
                 {key: program.exposed[:, at] for at, key in enumerate(keys)}, operations["start"].copy(),
                 operations["end"].copy(), tuple(table), program.records[:program.used[0]])


def hints(work: Workload) -> dict[str, Any]:
    """What ``schedules.schedule("greedy", ...)`` may know of a workload: computation with what lies in line, sends, and
    how many activations fit (of the largest chunk, on the fullest device; None where any number fits)."""
    in_line = [{phase: sum(encoding.seconds_of(one, work) for one in chunk.transfers
                           if one.phase == phase and not one.hidden) for phase in ("forward", "backward", "weight")}
               for chunk in work.chunks]
    pairs = list(zip(work.chunks, in_line, strict=True))
    each = max(len(work.chunks) // work.stages, 1)
    kept = each * max(chunk.weights + chunk.gradients + chunk.optimizer for chunk in work.chunks)
    largest = max(chunk.activation for chunk in work.chunks)
    room = work.memory - kept - max(chunk.peak for chunk in work.chunks)
    fits = int(max(room, 0) // largest) if largest > 0 else work.microbatches * each
    return {"forward": [chunk.forward + more["forward"] for chunk, more in pairs],
            "backward_input": [chunk.backward_input + more["backward"] for chunk, more in pairs],
            "backward_weight": [chunk.backward_weight + more["weight"] for chunk, more in pairs],
            "send": [encoding.seconds_of(chunk.send, work) if chunk.send else 0.0 for chunk in work.chunks[:-1]],
            "limit": None if fits >= work.microbatches * each else max(fits, each)}


def _durations(chunk: Chunk) -> tuple[float, ...]:
    return chunk.forward, chunk.backward_input, chunk.backward_weight, chunk.update


def _seconds(work: Workload, plan: Schedule) -> float:
    program = encoding.program(work, plan)[2]
    streams.run(program)
    return float((program.devices["end"] + encoding.updates(work, plan)).max())
