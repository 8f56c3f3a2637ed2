"""The plain versions: read like what they say, in pure Python, for tests and for reading."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence

from semel.planning import encoding, streams
from semel.planning.events import Tasks
from semel.planning.schedules import KINDS, Schedule
from semel.planning.workload import Workload


def run(work: Workload, plan: Schedule) -> tuple[list[list[tuple[float, float]]], float]:
    """``streams.run`` as a recursion: ([device][operation] (start, end), seconds of the step). Each device's clock, its
    links and its list are one chain; between devices there are only arrivals."""
    table, lists, sends = encoding.table(work, plan)
    seconds = [encoding.seconds_of(one, work) for one in table]
    computation = encoding.computation(work).tolist()
    pairs = set(plan.pairs.tolist())
    last = len(work.chunks) - 1
    ends = [0.0] * plan.devices

    def of(op: tuple[int, int, int], role: int) -> list[int]:
        return lists.get((op[2], op[0], role), [])

    def device(d: int):  # one generator a device: asks for arrivals, gives what it sends
        links = dict.fromkeys(work.links, 0.0)
        flat = [(KINDS.index(op.kind), op.microbatch, op.chunk) for op in plan.ops[d]]
        first = int(plan.offsets[d])
        groups, at = [], 0
        while at < len(flat):
            width = 2 if first + at in pairs else 1
            groups.append(flat[at:at + width])
            at += width
        left = {chunk: sum(op[2] == chunk and KINDS[op[0]] in "BW" for op in flat) for chunk in range(last + 1)}
        free = trailing = 0.0

        def issue(index: int, ready: float) -> float:
            one = table[index]
            start = max([ready, *(links[name] for name, _ in one.loads)])
            for name, size in one.loads:
                links[name] = start + one.count * size / work.links[name]
            return start + seconds[index]

        def trail(op, role: int, start: float, computed: float) -> None:
            nonlocal trailing
            for index in lists.get((op[2], op[0] if role == streams.AFTER else 0, role), []):
                count = table[index].count
                end = issue(index, start + (computed - start) / count)
                trailing = max(trailing, end, computed + seconds[index] / count)

        def gather(group, ready: float) -> tuple[float, float, int]:
            found = (0.0, 0.0, 1)
            for op in group:
                for index in of(op, streams.BEFORE):
                    end, count = issue(index, ready), table[index].count
                    found = (max(found[0], end - seconds[index] * (1 - 1 / count)), max(found[1], end),
                             max(found[2], count))
            return found

        ready = {}
        for chunk in range(last + 1):
            if plan.placement[chunk] == d:
                ready[chunk] = max([0.0, *(issue(x, 0.0) for x in lists.get((chunk, 0, streams.AT_START), []))])
                for index in lists.get((chunk, 0, streams.AT_START_IN_LINE), []):
                    free = issue(index, free)
        ahead = gather(groups[0], free) if groups else (0.0, 0.0, 1)
        before: list = []
        for number, group in enumerate(groups):
            came = 0.0
            for op in group:
                if KINDS[op[0]] != "W":
                    came = max(came, (yield ("F" if op[0] == 0 else "B", op[2], op[1])))
            (first_part, last_part, parts) = ahead
            if number + 1 < len(groups):
                ahead = gather(groups[number + 1], free)
            start = max([free, first_part, came, *(ready[op[2]] for op in group)])
            beside = [issue(x, start) for op in group for x in of(op, streams.BESIDE)]
            for op, begun, ended in before:
                trail(op, streams.AFTER, begun, ended)
            compute = sum(computation[op[2]][op[0]] for op in group)
            computed = max(start + compute, max(start + compute * (1 - 1 / parts), last_part) + compute / parts)
            done = [computed, *beside]
            for op in group:
                now = start if len(group) == 2 else computed
                for index in of(op, streams.IN_LINE):
                    now = issue(index, now)
                done.append(now)
            free = end = max(done)
            for op in group:
                kind, microbatch, chunk = op
                to = chunk + 1 if kind == 0 else chunk - 1
                if kind == 0 and chunk == last:
                    arrived["B", chunk, microbatch] = end
                elif KINDS[kind] != "W" and to >= 0:
                    index = sends[min(chunk, to)]
                    crosses = index >= 0 and plan.placement[to] != d
                    arrives = issue(index, end) if crosses else end
                    if crosses and not table[index].hidden:
                        free = max(free, arrives)
                    arrived["F" if kind == 0 else "B", to, microbatch] = arrives
                times[d].append((start, end))
                if KINDS[kind] in "BW":
                    left[chunk] -= 1
                    if left[chunk] == 0:
                        trail(op, streams.AT_END, start, computed)
            before = [(op, start, computed) for op in group]
        for op, begun, ended in before:
            trail(op, streams.AFTER, begun, ended)
        end = max(free, trailing)
        for chunk in range(last + 1):
            if plan.placement[chunk] == d:
                for index in lists.get((chunk, 0, streams.AT_END_IN_LINE), []):
                    end = issue(index, end)
        ends[d] = end + sum(chunk.update for chunk, on in zip(work.chunks, plan.placement, strict=True) if on == d)

    arrived = {("F", 0, microbatch): 0.0 for microbatch in range(plan.count)}
    times: list[list[tuple[float, float]]] = [[] for _ in range(plan.devices)]
    running = {d: device(d) for d in range(plan.devices)}
    wants = {d: next(one) for d, one in running.items() if len(plan.ops[d])}
    while wants:
        able = [(d, want) for d, want in wants.items() if want in arrived]
        if not able:
            raise ValueError(f"{plan.name} comes to a standstill")
        for d, want in able:
            try:
                wants[d] = running[d].send(arrived[want])
            except StopIteration:
                del wants[d]
    return times, max(ends)


def fair(flows: Sequence[Mapping[Hashable, float]], bandwidth: Mapping[Hashable, float]) -> list[float]:
    """``events.fill``: the rate of each flow, a mapping from its links to bytes there for each byte of its own.
    Max-min: no rate can grow without a smaller one shrinking."""
    rates: dict[int, float] = {}
    while len(rates) < len(flows):
        level = {}
        for link, capacity in bandwidth.items():
            taken = sum(rate * flows[flow].get(link, 0.0) for flow, rate in rates.items())
            wanted = sum(flow.get(link, 0.0) for number, flow in enumerate(flows) if number not in rates)
            if wanted > 0:
                level[link] = max(capacity - taken, 0.0) / wanted
        tightest = min(level, key=lambda link: level[link])
        rates |= {number: level[tightest] for number, flow in enumerate(flows)
                  if number not in rates and flow.get(tightest, 0.0) > 0}
    return [rates[number] for number in range(len(flows))]


def run_tasks(tasks: Tasks, bandwidth: Mapping[Hashable, float]) -> list[tuple[float, float]]:
    """``events.run``: (start, end) of each task, from one moment at which something happens to the next."""
    n = len(tasks.seconds)
    start, end = [math.inf] * n, [math.inf] * n
    carried = [max((size for _, size in loads), default=0.0) for loads in tasks.loads]  # bytes left
    sent = [math.inf] * n
    now = 0.0
    while True:
        for task in range(n):  # followers have higher numbers than what they follow
            if sent[task] <= now:
                end[task] = min(end[task], sent[task] + tasks.seconds[task])
            if start[task] == math.inf and all(end[before] <= now for before in tasks.follows[task]):
                start[task] = now
                if carried[task] == 0:
                    sent[task], end[task] = now, now + tasks.seconds[task]
        under_way = [task for task in range(n) if start[task] <= now and carried[task] > 0]
        rates = fair([{link: size / max(size for _, size in tasks.loads[task]) for link, size in tasks.loads[task]}
                      for task in under_way], bandwidth)
        moments = [now + carried[task] / rate for task, rate in zip(under_way, rates, strict=True)]
        then = min([*moments, *(moment for moment in end if now < moment < math.inf)], default=math.inf)
        if then == math.inf:
            return list(zip(start, end, strict=True))
        for task, rate, moment in zip(under_way, rates, moments, strict=True):
            carried[task] = 0.0 if moment <= then else carried[task] - rate * (then - now)
            if carried[task] == 0:
                sent[task] = then
        now = then
