"""Predicted against measured steps of a small pipeline x data-parallel job in real processes.

    python -m benchmarks.planning_real [--plans 10] [--rounds 5] [--scale 1] [--json FILE]

Four processes (gloo) stand for four devices, two in each of two buildings. A model of 12 layers is trained on 8
micro-batches a step; each micro-batch takes 120 ms forward, 120 ms backward for its inputs and 120 ms for its weights
through the whole model: timed sleep, since two cores would measure their scheduler otherwise. Each device has a token
bucket for each level, inside its building and between the buildings: a message leaves when those before it have left,
at the bucket's rate, and arrives its latency later (gloo carries it, the receiver waits for the stamped time); sums
over replicas are all-reduces of gloo, which begin when the last replica joins. ``--scale`` stretches all times.

Plans: which axis crosses between the buildings (pipeline, replicas, or both), schedule, whether sends hold the device,
whether gradients are summed bucket by bucket. Of all that are tried those are run whose predicted steps differ by at
least 10 %, from the fastest on, up to ``--plans``. Plans take turns, a step each a round; a step is the last process's
end less the last one's start; medians over rounds.

    error   measured / predicted - 1
    tau     Kendall's, of the predicted and the measured order
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from semel.planning.schedules import Schedule, schedule
from semel.planning.simulate import hints, simulate
from semel.planning.workload import Chunk, Transfer, Workload

DEVICES, MICROBATCHES, LAYERS = 4, 8, 12
PASS_S = 0.12
LINKS = {"inside": 400e6, "between": 40e6}
LATENCY = {"inside": 0.001, "between": 0.05}
ACTIVATION, GRADIENTS = 1e6, 24e6
"""Bytes: of one micro-batch between two layers; of the whole model."""
BUCKETS = 4
APART = 1.1


@dataclass(frozen=True)
class Plan:
    """``ranks[replica][stage]``: which process; two in a building: 0 and 1, 2 and 3."""

    name: str
    work: Workload
    schedule: Schedule
    ranks: tuple[tuple[int, ...], ...]


def level(a: int, b: int) -> str:
    return "inside" if a // 2 == b // 2 else "between"


def make(ranks: tuple[tuple[int, ...], ...], name: str, chunks: int = 1, *, sends_hidden: bool = True,
         buckets: bool = True, scale: float = 1.0) -> Plan:
    """Replicas must cross the same levels at the same stage, so that one stands for all."""
    stages, microbatches = len(ranks[0]), MICROBATCHES // len(ranks)
    held = stages * chunks
    seconds = scale * PASS_S / held
    placement = schedule(name, stages, microbatches, chunks).placement
    parts = []
    for chunk in range(held):
        transfers: tuple[Transfer, ...] = ()
        if len(ranks) > 1:
            far = level(ranks[0][placement[chunk]], ranks[1][placement[chunk]])
            n = len(ranks)
            far = "between" if n > 2 else far
            size, count = scale * GRADIENTS / held, BUCKETS if buckets else 1
            # A ring: every link carries 2 (n - 1) / n of the vector, in as many steps.
            transfers = (Transfer("dp", "all_reduce", size / count, 2 * (n - 1) * scale * LATENCY[far],
                                  ((far, 2 * (n - 1) / n * size / count),), "end", buckets, count),)
        send = None
        if chunk + 1 < held and placement[chunk] != placement[chunk + 1]:
            near = level(ranks[0][placement[chunk]], ranks[0][placement[chunk + 1]])
            send = Transfer("pp", "send", scale * ACTIVATION, scale * LATENCY[near], ((near, scale * ACTIVATION),),
                            "forward", sends_hidden)
        parts.append(Chunk(seconds, seconds, seconds, transfers, send, 0, 0, 0, 1, 0))
    work = Workload(tuple(parts), DEVICES, stages, microbatches, LINKS, 1e9, 1.0, 1.0)
    known = {**hints(work), "limit": None} if name == "greedy" else {}
    label = f"{len(ranks)} x {stages}, {'-'.join(map(str, ranks[0]))} {name}" + (f" x{chunks}" if chunks > 1 else "")
    label += ("" if sends_hidden else ", sends in line") + ("" if buckets or len(ranks) == 1 else ", sum after all")
    return Plan(label, work, schedule(name, stages, microbatches, chunks, **known), ranks)


def candidates(scale: float = 1.0) -> list[Plan]:
    pipeline, replicas_across, pipeline_across = ((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))
    zigzag, replicas = ((0, 2, 1, 3),), ((0,), (1,), (2,), (3,))
    found = []
    for ranks in (pipeline, zigzag):
        for hidden in (True, False):
            for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("greedy", 1)):
                found.append(make(ranks, name, chunks, sends_hidden=hidden, scale=scale))
    for ranks in (replicas_across, pipeline_across):
        for name in ("gpipe", "1f1b", "zb_h1", "greedy"):
            found += [make(ranks, name, buckets=buckets, scale=scale) for buckets in (True, False)]
    found += [make(replicas, "1f1b", buckets=buckets, scale=scale) for buckets in (True, False)]
    return found


def apart(plans: list[Plan], most: int) -> list[tuple[Plan, float]]:
    """From the fastest on, each at least ``APART`` times as long as the one before."""
    found: list[tuple[Plan, float]] = []
    for plan, seconds in sorted(((plan, simulate(plan.work, plan.schedule).seconds) for plan in plans),
                                key=lambda pair: pair[1]):
        if not found or seconds >= APART * found[-1][1]:
            found.append((plan, seconds))
    return found[:most]


class Bucket:
    """A link's token bucket in time: when what was given to it has left."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s, self.empty_at = bytes_per_s, 0.0

    def leave(self, size: float, ready: float) -> float:
        self.empty_at = max(self.empty_at, ready) + size / self.bytes_per_s
        return self.empty_at


def sleep_until(moment: float) -> None:
    while (left := moment - time.monotonic()) > 0:
        time.sleep(left)


def run_step(plan: Plan, rank: int, groups: dict[tuple[int, ...], Any]) -> tuple[float, float]:
    """This process's part of one step: (start, end) on the clock that all processes of a machine share."""
    import torch
    import torch.distributed as dist

    work, order = plan.work, plan.schedule
    replica = next(number for number, stages in enumerate(plan.ranks) if rank in stages)
    mine = plan.ranks[replica]
    stage = mine.index(rank)
    held = len(work.chunks)
    links = {name: Bucket(rate) for name, rate in work.links.items()}
    ops = order.ops[stage]

    def tag(way: str, chunk: int, microbatch: int) -> int:
        return (0 if way == "F" else 1) + 2 * (chunk + held * microbatch)

    incoming = {}
    for op in ops:
        source = op.chunk - 1 if op.kind == "F" else op.chunk + 1
        if op.kind != "W" and 0 <= source < held and order.placement[source] != stage:
            came = torch.zeros(1, dtype=torch.float64)
            key = ("F" if op.kind == "F" else "B", op.chunk, op.microbatch)
            incoming[key] = came, dist.irecv(came, mine[order.placement[source]], tag=tag(*key))
    replicas = tuple(stages[stage] for stages in plan.ranks)
    left = {chunk: sum(op.chunk == chunk and op.kind in "BW" for op in ops) for chunk in range(held)}
    sums, outgoing = [], []
    dist.barrier()
    begin = now = time.monotonic()
    for op in ops:
        chunk = work.chunks[op.chunk]
        key = ("F" if op.kind == "F" else "B", op.chunk, op.microbatch)
        if op.kind != "W" and key in incoming:
            came, handle = incoming[key]
            handle.wait()
            sleep_until(float(came))
        start = time.monotonic()
        seconds = {"F": chunk.forward, "I": chunk.backward_input, "W": chunk.backward_weight,
                   "B": chunk.backward_input + chunk.backward_weight}[op.kind]
        left[op.chunk] -= op.kind in "BW"
        if op.kind in "BW" and left[op.chunk] == 0:
            for transfer in chunk.transfers:
                for bucket in range(transfer.count) if transfer.hidden else ():
                    sleep_until(start + seconds * (bucket + 1) / transfer.count)
                    joined = torch.tensor([time.monotonic()], dtype=torch.float64)
                    sums.append((transfer, joined, dist.all_reduce(joined, dist.ReduceOp.MAX, groups[replicas],
                                                                   async_op=True)))
        sleep_until(start + seconds)
        now = time.monotonic()
        to = op.chunk + 1 if op.kind == "F" else op.chunk - 1
        if op.kind != "W" and 0 <= to < held and order.placement[to] != stage:
            transfer = work.chunks[min(op.chunk, to)].send
            gone = max(links[name].leave(size, now) for name, size in transfer.loads)
            stamp = torch.tensor([gone + transfer.latency], dtype=torch.float64)
            outgoing.append((stamp, dist.isend(stamp, mine[order.placement[to]],
                                               tag=tag("F" if op.kind == "F" else "B", to, op.microbatch))))
            if not transfer.hidden:
                sleep_until(float(stamp))
    for chunk in work.chunks:
        for transfer in chunk.transfers:
            if not transfer.hidden and order.placement[work.chunks.index(chunk)] == stage:
                joined = torch.tensor([time.monotonic()], dtype=torch.float64)
                sums.append((transfer, joined, dist.all_reduce(joined, dist.ReduceOp.MAX, groups[replicas],
                                                               async_op=True)))
    for transfer, joined, handle in sums:
        handle.wait()
        gone = max(links[name].leave(size, float(joined)) for name, size in transfer.loads)
        links[transfer.loads[0][0]].empty_at = gone + transfer.latency  # a collective's steps wait for each other
        sleep_until(gone + transfer.latency)
    for _, handle in outgoing:
        handle.wait()
    return begin, time.monotonic()


def measure(plans: list[Plan], rounds: int) -> list[list[float]]:
    """In each process: seconds of each round of each plan."""
    import torch
    import torch.distributed as dist

    from semel.comm.processes import join

    torch.set_num_threads(1)
    rank = join().rank
    wanted = sorted({tuple(stages[stage] for stages in plan.ranks) for plan in plans
                     for stage in range(len(plan.ranks[0])) if len(plan.ranks) > 1})
    groups = {ranks: dist.new_group(list(ranks)) for ranks in wanted}
    found: list[list[float]] = [[] for _ in plans]
    for turn in range(rounds + 1):
        for number, plan in enumerate(plans):
            if turn == 0 and number > 0:
                continue  # the first step of all is not counted: connections are made in it
            begin, end = run_step(plan, rank, groups)
            both = torch.tensor([begin, end], dtype=torch.float64)
            dist.all_reduce(both, dist.ReduceOp.MAX)
            if turn > 0:
                found[number].append(float(both[1] - both[0]))
    return found


def kendall(a: list[float], b: list[float]) -> float:
    """Kendall's tau-a: of all pairs, those in the same order less those in the other."""
    pairs = list(combinations(range(len(a)), 2))
    signs = [(a[i] - a[j]) * (b[i] - b[j]) for i, j in pairs]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(pairs)


def run(plans: int, rounds: int, scale: float) -> dict[str, Any]:
    from semel.comm.processes import spawn

    chosen = apart(candidates(scale), plans)
    measured = spawn(measure, DEVICES, [plan for plan, _ in chosen], rounds)[0]
    medians = [statistics.median(of_plan) for of_plan in measured]
    rows = [{"plan": plan.name, "predicted_s": seconds, "measured_s": median, "error": median / seconds - 1,
             "rounds": of_plan}
            for (plan, seconds), median, of_plan in zip(chosen, medians, measured, strict=True)]
    return {"plans": rows, "tau": kendall([seconds for _, seconds in chosen], medians),
            "worst_error": max(abs(row["error"]) for row in rows), "rounds": rounds, "scale": scale}


def show(result: dict[str, Any]) -> None:
    print(f"  {'plan':48} {'predicted s':>11} {'measured s':>10} {'error':>7}")
    for row in result["plans"]:
        print(f"  {row['plan']:48} {row['predicted_s']:11.3f} {row['measured_s']:10.3f} {row['error']:+7.1%}")
    print(f"  {len(result['plans'])} plans, {result['rounds']} rounds: tau {result['tau']:.2f}, "
          f"worst error {result['worst_error']:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of all times")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if arguments.plans < 2 or arguments.rounds < 1 or not arguments.scale > 0:
        parser.error("--plans must be at least 2, --rounds at least 1, --scale above 0")
    result = run(arguments.plans, arguments.rounds, arguments.scale)
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
