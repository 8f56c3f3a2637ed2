"""A training step of hundreds of ranks on a clock of events: what waiting is left of it with all three parts of "wait
never".

    python -m benchmarks.freescale [--ranks 256] [--requests 128] [--steps 4] [--length 21000] [--exponent 0.8]
                                   [--scale 1000] [--json FILE]

The code that decides is the trainer's own: ``balance.equal_count`` says which rank computes which request, and
``Blocking`` or ``Prioritized`` run as they are, in a thread a rank, over small tables; only time is simulated. Each
rank has two clocks, of its loop and of its schedule's thread. A computation moves the loop's by what its requests cost;
an exchange starts when the last rank has come and moves all clocks by ``latency + bytes / bandwidth`` of the fullest.

Stated, for one step of H100s: histories log-normal, median 3,000, sigma 1.2, cut at ``--length``; a request of length L
costs 5,000 L + L^2 (projections and attention equal at 5,000 events), scaled so that the mean rank computes 450 ms
without anything else; forward is a third of it. Ids over a catalogue of 100 million items with popularity
~ rank^-exponent, as many as the requests have events, at 1 / ``--scale`` of their number: bytes count ``--scale``
times. The exponent decides which share of rows two successive batches have in common (published: about 12 %, P99
14 %). A network of 25 GB/s a rank (InfiniBand, 200 Gb/s, as published) at 70 %, 20 us a message; rows of 384 float32,
with which blocking is about as exposed as published. FreeScale's own figures (arXiv 2604.24073): 22 % of a step idle
before, 2.4 % after; 111 ms of exposed exchange at 8K, 13 after; bubbles -90.3 % on 256 H100.

    straggler   the mean rank's wait for the slowest, before an exchange or the sum of dense gradients
    exposed     what the loop waits for exchanges of embeddings
    bubbles     both, as a share of the step; less: against unbalanced + blocking
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.balance import cost_of, draw_lengths
from semel.comm import Handle, Transport, run_threads
from semel.comm.interface import Done
from semel.training import balance
from semel.training.embedding import Blocking, Prioritized, RowWiseAdagrad, ShardedEmbedding
from semel.training.embedding import schedule as embedding_schedule

COMPUTE_S, FORWARD = 0.45, 1 / 3
BANDWIDTH, LATENCY = 25e9 * 0.7, 20e-6
CATALOGUE, DIM = 100_000_000, 384
WARM = 1
"""Steps at the start that are left out: nothing was fetched before the first."""


@dataclass
class Clock:
    """Of one rank. ``now`` is the loop's or the thread's, whichever runs."""

    loop: float = 0.0
    thread: float = 0.0
    in_thread: bool = False
    straggler: float = 0.0
    exposed: float = 0.0
    busy: float = 0.0
    marks: list[tuple[float, float, float]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.thread if self.in_thread else self.loop

    def move(self, ready: float, to: float) -> None:
        """To ``to``; until ``ready`` it waited for other ranks."""
        if self.in_thread:
            self.thread = to
        else:
            self.straggler += ready - self.loop
            self.exposed += to - ready
            self.loop = to


class Clocked:
    """A transport whose exchanges take simulated time. Beside what is sent go the senders' clocks and bytes."""

    def __init__(self, transport: Transport, clock: Clock, scale: int) -> None:
        self.transport, self.clock, self.scale = transport, clock, scale
        self.rank, self.world_size = transport.rank, transport.world_size

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        away = sum(send) - send[self.rank]
        row = values.shape[1:].numel() * values.element_size()
        found = self.transport.all_to_all(values, send, receive).wait()
        # A message of one number a rank (counts) is as long at any scale.
        self._pass(away * row * (1 if list(send) == [1] * self.world_size else self.scale))
        return Done(found)

    def all_gather(self, values: Tensor) -> Handle:
        found = self.transport.all_gather(values).wait()
        self._pass(values.numel() * values.element_size() * (self.world_size - 1))
        return Done(found)

    def _pass(self, sent: float) -> None:
        every = self.transport.all_gather(torch.tensor([self.clock.now, sent], dtype=torch.float64)).wait()
        ready, most = every.max(0).values.tolist()
        self.clock.move(ready, ready + LATENCY + most / BANDWIDTH)

    def barrier(self) -> None:
        """Dense gradients: their sum waits for the slowest; how long it takes itself is the same in all cases."""
        every = self.transport.all_gather(torch.tensor([self.clock.loop], dtype=torch.float64)).wait()
        ready = float(every.max())
        self.clock.move(ready, ready)


class SimulatedWorker:
    """Does at once what the schedule asks of its thread, on the thread's clock."""

    clocks: dict[int, Clock]

    def __init__(self, name: str) -> None:
        self.clock = self.clocks[threading.get_ident()]

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        clock = self.clock
        clock.thread = max(clock.thread, clock.loop)
        clock.in_thread = True
        try:
            result = function()
        finally:
            clock.in_thread = False
        return SimulatedFuture(clock, clock.thread, result)

    def close(self) -> None:
        pass


class SimulatedFuture(Future):
    def __init__(self, clock: Clock, done: float, value: Any) -> None:
        super().__init__()
        self.clock, self.done_at, self.value = clock, done, value

    def result(self, timeout: float | None = None) -> Any:
        if self.done_at > self.clock.loop:
            self.clock.exposed += self.done_at - self.clock.loop
            self.clock.loop = self.done_at
        return self.value


def draw_ids(random: np.random.Generator, count: int, exponent: float) -> np.ndarray:
    """Zipf, by the inverse of its continuous distribution."""
    draws = random.random(count)
    return ((1 + draws * (CATALOGUE ** (1 - exponent) - 1)) ** (1 / (1 - exponent))).astype(np.int64)


def plan(options: dict[str, Any], balanced: bool) -> tuple[np.ndarray, list[list[np.ndarray]], float]:
    """Seconds [steps, ranks] of each rank's computation, ids [step][rank], and the idle share by cost."""
    ranks, requests, steps = options["ranks"], options["requests"], options["steps"] + WARM
    seconds = np.empty((steps, ranks))
    ids: list[list[np.ndarray]] = []
    idle = []
    for step in range(steps):
        random = np.random.default_rng([step, ranks])
        lengths = draw_lengths(ranks * requests, random, options["length"])
        costs = cost_of(lengths)
        home = np.arange(len(lengths)) % ranks
        chosen = balance.equal_count(costs, ranks) if balanced else home
        load = balance.loads(costs, chosen, ranks)
        seconds[step] = COMPUTE_S * load / load.mean()
        idle.append(balance.idle(costs, chosen, ranks))
        tokens = balance.loads(lengths, chosen, ranks)
        ids.append([draw_ids(random, max(1, round(count / options["scale"])), options["exponent"]) for count in tokens])
    return seconds, ids, float(np.mean(idle))


def numbered(ids: list[list[np.ndarray]]) -> tuple[list[list[Tensor]], int]:
    """The same ids as 0 .. n - 1."""
    known = np.unique(np.concatenate([part for step in ids for part in step]))
    order = np.random.default_rng(1).permutation(len(known))
    return [[torch.from_numpy(order[np.searchsorted(known, part)]) for part in step] for step in ids], len(known)


def simulate(options: dict[str, Any], balanced: bool, kind: Any) -> dict[str, float]:
    seconds, drawn, idle = plan(options, balanced)
    ids, rows = numbered(drawn)
    clocks = [Clock() for _ in range(options["ranks"])]
    by_thread: dict[int, Clock] = {}

    def rank(transport: Transport) -> float:
        clock = by_thread[threading.get_ident()] = clocks[transport.rank]
        link = Clocked(transport, clock, options["scale"])
        table = ShardedEmbedding(options["dim"], link, rows=rows, optimizer=RowWiseAdagrad(0.01))
        schedule = kind(table)
        own = [batch[transport.rank] for batch in ids]
        for step, (_, vectors) in enumerate(schedule(own, ids=lambda batch: batch)):
            for share in (FORWARD, 1 - FORWARD):
                clock.loop += share * seconds[step, transport.rank]
            clock.busy += seconds[step, transport.rank]
            vectors.grad = torch.zeros_like(vectors)
            schedule.step()
            link.barrier()
            clock.marks.append((clock.loop, clock.straggler, clock.exposed))
        report = schedule.report.steps[WARM:]
        return sum(one.collisions for one in report) / max(sum(one.rows for one in report), 1)

    SimulatedWorker.clocks = by_thread
    with mock.patch.object(embedding_schedule, "Worker", SimulatedWorker):
        collisions = run_threads(options["ranks"], rank, timeout_s=1800.0)
    steps = len(clocks[0].marks)
    spans = np.array([clock.marks for clock in clocks])  # [ranks, steps, 3]
    whole = (spans[:, -1] - spans[:, WARM - 1]).mean(0) / (steps - WARM)
    return {"step_s": float(whole[0]), "straggler_s": float(whole[1]), "exposed_s": float(whole[2]),
            "bubbles": float((whole[1] + whole[2]) / whole[0]), "idle_by_cost": idle,
            "collisions": float(np.mean(collisions))}


CASES = {"unbalanced, blocking": (False, Blocking), "balanced, blocking": (True, Blocking),
         "unbalanced, prioritized": (False, Prioritized), "balanced, prioritized": (True, Prioritized)}


def run(options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    cases = {name: simulate(options, *case) for name, case in CASES.items()}
    before = cases["unbalanced, blocking"]
    for case in cases.values():
        lost, was = case["step_s"] * case["bubbles"], before["step_s"] * before["bubbles"]
        case["less"] = 1 - lost / was
        case["faster"] = before["step_s"] / case["step_s"]
    return {**options, "cases": cases}


def show(result: dict[str, Any]) -> None:
    print(f"{result['ranks']} ranks x {result['requests']} requests, histories to {result['length']:,}; ids at "
          f"1/{result['scale']}; simulated seconds, means of {result['steps']} steps and all ranks")
    print(f"  {'':26} {'step ms':>8} {'straggler':>10} {'exposed':>8} {'bubbles':>8} {'less':>7} {'faster':>7} "
          f"{'collisions':>10}")
    for name, case in result["cases"].items():
        print(f"  {name:26} {1e3 * case['step_s']:8.1f} {1e3 * case['straggler_s']:10.1f} "
              f"{1e3 * case['exposed_s']:8.1f} {case['bubbles']:8.2%} {case['less']:7.1%} {case['faster']:6.2f}x "
              f"{case['collisions']:10.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--length", type=int, default=21_000)
    parser.add_argument("--scale", type=int, default=1000, help="one id stands for so many")
    parser.add_argument("--exponent", type=float, default=0.8, help="of the items' popularity, below 1")
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if min(arguments.ranks, arguments.requests, arguments.steps, arguments.scale) < 1:
        parser.error("--ranks, --requests, --steps and --scale must be at least 1")
    result = run({name: value for name, value in vars(arguments).items() if name != "json"})
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
