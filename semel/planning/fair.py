"""A step where all that is under way shares links max-min fairly: the same operations and transfers as ``simulate``,
on ``events`` in place of ``streams``.

Each device has a compute stream and a communication stream for each axis; a stream's transfers take turns, those of
different streams share the device's links. Closer to what cards do where axes meet on one link, but not monotone: a
faster link can make a step slower (``events``), which is why ``simulate`` and the search do not use it. Where no two
axes share a link, and each chunk has one transfer an axis and phase, both give the same times. Of two, whose parts hide
beside the same computation, ``streams`` lets the parts take turns, and this one follows the first with the second; nor
does it let others use the link between like parts with latency.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from semel.planning import encoding, streams
from semel.planning.events import Tasks, run
from semel.planning.schedules import KINDS, Schedule
from semel.planning.workload import Transfer, Workload

Operation = tuple[int, int, int]
"""Kind, micro-batch, chunk."""


@dataclass(frozen=True, eq=False)
class Fair:
    """Seconds of the step; start and end of each operation, in the schedule's order."""

    seconds: float
    op_start: np.ndarray
    op_end: np.ndarray


def simulate_fair(work: Workload, plan: Schedule) -> Fair:
    """One step. Raises ValueError where the lists cannot be followed to their end, or a link is not there."""
    build = _Build(work, plan)
    devices = {d: build.device(d) for d in range(plan.devices)}
    wants: dict[int, tuple[int, ...] | None] = {d: next(one, None) for d, one in devices.items()}
    while any(want is not None for want in wants.values()):
        able = [d for d, want in wants.items() if want is not None and all(key in build.arrived for key in want)]
        if not able:
            raise ValueError(f"{plan.name} comes to a standstill: schedules.check says where")
        for d in able:
            wants[d] = next(devices[d], None)
    bandwidth: dict[Hashable, float] = {
        (d, name): rate for d in range(plan.devices) for name, rate in work.links.items()}
    start, end = run(build.tasks, bandwidth)
    last = np.array([max((end[task] for task in tasks), default=0.0) for tasks in build.last])
    op_start = np.array([start[first] for first, _ in build.of_op])
    op_end = np.array([end[final] for _, final in build.of_op])
    return Fair(float((last + encoding.updates(work, plan)).max()), op_start, op_end)


class _Build:
    def __init__(self, work: Workload, plan: Schedule) -> None:
        self.work, self.plan, self.tasks = work, plan, Tasks()
        self.table, self.lists, self.sends = encoding.table(work, plan)
        self.computation = encoding.computation(work)
        self.arrived: dict[tuple[int, int, int], list[int]] = {(0, 0, m): [] for m in range(plan.count)}
        """(way, chunk, micro-batch) -> tasks after which the input is there."""
        self.streams: dict[tuple[int, str], int] = {}
        self.of_op: list[tuple[int, int]] = [(0, 0)] * len(plan.kinds)
        self.last: list[list[int]] = [[] for _ in range(plan.devices)]
        self.left = np.zeros(len(work.chunks), np.int64)
        np.add.at(self.left, plan.chunks[np.isin(plan.kinds, (streams.B, streams.W))], 1)

    def transfer(self, d: int, index: int, follows: Iterable[int], parts: int | None = None) -> int:
        """``parts`` of a transfer (all), after the stream's last: bytes first, then latency beside what comes next."""
        one: Transfer = self.table[index]
        count = one.count if parts is None else parts
        stream = (d, one.axis)
        before = {*follows, *([self.streams[stream]] if stream in self.streams else [])}
        sent = self.tasks.add(0.0, sorted(before), [((d, name), size * count) for name, size in one.loads])
        self.streams[stream] = sent
        return self.tasks.add(one.latency * count, [sent])

    def listed(self, op: Operation, role: int) -> list[int]:
        return self.lists.get((op[2], op[0] if role <= streams.AFTER else 0, role), [])

    def gathers(self, d: int, ops: list[Operation], ready: list[int]) -> tuple[list[int], list[int], int]:
        """(tasks of the first parts, of the last, parts)."""
        head, rest, most = [], [], 1
        for op in ops:
            for index in self.listed(op, streams.BEFORE):
                parts = self.table[index].count
                head.append(self.transfer(d, index, ready, 1))
                if parts > 1:
                    rest.append(self.transfer(d, index, head[-1:], parts - 1))
                most = max(most, parts)
        return head, rest or head, most

    def trailing(self, d: int, op: Operation, role: int, begun: dict[float, int], computed: int) -> None:
        for index in self.listed(op, role):
            parts = self.table[index].count
            before = [self.transfer(d, index, [begun[1 / parts]], parts - 1)] if parts > 1 else []
            self.last[d].append(self.transfer(d, index, [computed, *before], 1))

    def device(self, d: int) -> Iterator[tuple]:
        """Adds one operation (or pair) after the other; yields the inputs that it needs first."""
        plan, tasks, first = self.plan, self.tasks, int(self.plan.offsets[d])
        flat = [(KINDS.index(op.kind), op.microbatch, op.chunk) for op in plan.ops[d]]
        pairs, groups, at = set(plan.pairs.tolist()), [], 0
        while at < len(flat):
            groups.append(flat[at:at + (2 if first + at in pairs else 1)])
            at += len(groups[-1])
        ready: dict[int, list[int]] = {}
        free: list[int] = []
        for chunk in np.flatnonzero(np.asarray(plan.placement) == d).tolist():
            ready[chunk] = [self.transfer(d, x, []) for x in self.lists.get((chunk, 0, streams.AT_START), [])]
            for x in self.lists.get((chunk, 0, streams.AT_START_IN_LINE), []):
                free = [self.transfer(d, x, free)]
        ahead = self.gathers(d, groups[0], free) if groups else ([], [], 1)
        before: list[tuple[Operation, dict[float, int], int]] = []
        at = first
        for number, group in enumerate(groups):
            needs = tuple((0 if op[0] == streams.F else 1, op[2], op[1]) for op in group if op[0] != streams.W)
            yield needs
            head, rest, parts = ahead
            if number + 1 < len(groups):
                ahead = self.gathers(d, groups[number + 1], free)
            start = tasks.add(0.0, sorted({*free, *head, *(task for key in needs for task in self.arrived[key]),
                                           *(task for op in group for task in ready[op[2]])}))
            done = [self.transfer(d, index, [start]) for op in group for index in self.listed(op, streams.BESIDE)]
            for trail in before:
                self.trailing(d, trail[0], streams.AFTER, trail[1], trail[2])
            begun, computed = self.compute(group, start, rest, parts)
            for op in group:
                now = start if len(group) == 2 else computed
                for index in self.listed(op, streams.IN_LINE):
                    now = self.transfer(d, index, [now])
                done.append(now)
            end = tasks.add(0.0, sorted({computed, *done}))
            free = [end]
            for op in group:
                self.of_op[at] = (start, end)
                at += 1
                free += self.send(d, op, end)
                if op[0] in (streams.B, streams.W):
                    self.left[op[2]] -= 1
                    if self.left[op[2]] == 0:
                        self.trailing(d, op, streams.AT_END, begun, computed)
            before = [(op, begun, computed) for op in group]
        for trail in before:
            self.trailing(d, trail[0], streams.AFTER, trail[1], trail[2])
        self.last[d] += free
        for chunk in ready:
            for x in self.lists.get((chunk, 0, streams.AT_END_IN_LINE), []):
                self.last[d] = [self.transfer(d, x, sorted(set(self.last[d])))]

    def compute(self, group: list[Operation], start: int, rest: list[int], parts: int) -> tuple[dict[float, int], int]:
        """(share of the computation -> task after which it is done, the last task), cut where a transfer may begin."""
        seconds = float(sum(self.computation[op[2], op[0]] for op in group))
        cuts = {1 - 1 / parts} if rest else set()
        cuts |= {1 / self.table[index].count for op in group for role in (streams.AFTER, streams.AT_END)
                 for index in self.listed(op, role)}
        done, share, task = {}, 0.0, start
        for cut in sorted((cuts | {1.0}) - {0.0}):
            wait = rest if rest and share == 1 - 1 / parts else []
            task = self.tasks.add((cut - share) * seconds, sorted({task, *wait}))
            done[cut], share = task, cut
        return done, task

    def send(self, d: int, op: Operation, end: int) -> list[int]:
        """Adds the arrival; what the device itself waits for then."""
        kind, microbatch, chunk = op
        last = len(self.work.chunks) - 1
        if kind == streams.F and chunk == last:
            self.arrived[1, chunk, microbatch] = [end]
            return []
        to, way = (chunk + 1, 0) if kind == streams.F else (chunk - 1, 1)
        if kind == streams.W or to < 0:
            return []
        index = self.sends[min(chunk, to)]
        crosses = index >= 0 and self.plan.placement[to] != d
        task = self.transfer(d, index, [end]) if crosses else end
        self.arrived[way, to, microbatch] = [task]
        return [task] if crosses and not self.table[index].hidden else []
