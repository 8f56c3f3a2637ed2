"""A training step of hundreds of ranks on a clock of events: what waiting is left of it with all three parts of "wait
never".

    python -m benchmarks.freescale [--ranks 256] [--requests 128] [--steps 2] [--length 21000] [--collisions 0.12]
                                   [--exponent EXPONENT] [--scale 100] [--error 0] [--ends] [--json FILE]

The code that decides is the trainer's own: ``balance.equal_count`` says which rank computes which request, and
``Blocking`` or ``Prioritized`` run as they are, in a thread a rank, over small tables; only time is simulated. Each
rank has two clocks, of its loop and of its schedule's thread. A computation moves the loop's by what its requests cost;
an exchange starts when the last rank has come and moves all clocks by ``latency + bytes / bandwidth`` of the fullest
link, which is the most that any rank sends or receives.

Stated, for one step of H100s: histories log-normal, median 3,000, sigma 1.2, cut at ``--length``; a request of length L
costs 5,000 L + L^2 (projections and attention equal at 5,000 events), scaled so that the mean rank computes 450 ms
without anything else; forward is a third of it. A network of 25 GB/s a rank (InfiniBand, 200 Gb/s, as published) at
70 %, 20 us a message; rows of 384 float32, which are carried 4 wide and counted as 384.

Ids: one for each event, over a catalogue of 100 million items with popularity ~ rank^-exponent. Only 1 in ``--scale``
is drawn, and bytes count ``--scale`` times. The published quantity is the share of a batch's rows that the batch before
used too, about 12 % (``--collisions``; P99 14 %): the exponent is the one that gives it to what is drawn, so that every
scale is about the same workload; ``--exponent`` sets it by hand. Thinning distorts one thing: a row that all ranks want
is one of a few thousand that its owner sends, not one of hundreds of thousands, so that the fullest link is further
above the mean than it would be. ``uneven`` below is what that costs; it shrinks as the scale does.

FreeScale's own figures (arXiv 2604.24073): 22 % of a step idle before, 2.4 % after; 111 ms of exposed exchange at 8K,
13 after; bubbles -90.3 % on 256 H100.

    straggler   the mean rank's wait for the slowest, before an exchange or the sum of dense gradients
    exposed     what the loop waits for exchanges of embeddings: of ids (and masks), of rows, of gradients, at the mean
                link's speed; latency of messages; and uneven, for how much longer the fullest link took
    bubbles     both, as a share of the step; less: against unbalanced + blocking
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
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
from semel.training.embedding.schedule import Schedule

COMPUTE_S, FORWARD = 0.45, 1 / 3
BANDWIDTH, LATENCY = 25e9 * 0.7, 20e-6
CATALOGUE, DIM, CARRIED = 100_000_000, 384, 4
KINDS = ("straggler", "ids", "rows", "gradients", "latency", "uneven")
EXPOSED = KINDS[1:]
WARM = 1
"""Steps at the start that are left out: nothing was fetched before the first."""


@dataclass
class Clock:
    """Of one rank. ``now`` is the loop's or the thread's, whichever runs; ``waited`` [kinds]: the loop's seconds."""

    loop: float = 0.0
    thread: float = 0.0
    in_thread: bool = False
    waited: np.ndarray = field(default_factory=lambda: np.zeros(len(KINDS)))
    busy: list[tuple[int, float, float]] = field(default_factory=list)
    """What the thread's time went into: (kind, from, to)."""
    marks: list[tuple[float, ...]] = field(default_factory=list)

    @property
    def now(self) -> float:
        return self.thread if self.in_thread else self.loop

    def wait(self, kind: str, until: float) -> None:
        if self.in_thread:
            self.busy.append((KINDS.index(kind), self.thread, until))
            self.thread = until
        else:
            self.waited[KINDS.index(kind)] += until - self.loop
            self.loop = until

    def join(self, done: float) -> None:
        """The loop waits for what its thread did until ``done``."""
        for kind, start, stop in self.busy:
            self.waited[kind] += max(0.0, min(stop, done) - max(start, self.loop))
        self.busy = [part for part in self.busy if part[2] > done]
        self.loop = max(self.loop, done)


class Clocked:
    """A transport whose exchanges take simulated time. Beside what is sent go the senders' clocks and bytes."""

    def __init__(self, transport: Transport, clock: Clock, scale: int, dim: int) -> None:
        self.transport, self.clock, self.scale, self.dim = transport, clock, scale, dim
        self.rank, self.world_size = transport.rank, transport.world_size
        self.kind = "ids"

    def all_to_all(self, values: Tensor, send: Sequence[int], receive: Sequence[int]) -> Handle:
        away = max(sum(send) - send[self.rank], sum(receive) - receive[self.rank])
        row = 4 * self.dim if values.is_floating_point() else values.shape[1:].numel() * values.element_size()
        found = self.transport.all_to_all(values, send, receive).wait()
        # A message of one number a rank (counts) is as long at any scale.
        counts = list(send) == [1] * self.world_size
        self._pass(self.kind if values.is_floating_point() else "ids", away * row * (1 if counts else self.scale))
        return Done(found)

    def all_gather(self, values: Tensor) -> Handle:
        found = self.transport.all_gather(values).wait()
        self._pass("ids", values.numel() * values.element_size() * (self.world_size - 1))
        return Done(found)

    def _pass(self, kind: str, away: float) -> None:
        every = self._clocks(away)
        ready, most = every.max(0).values.tolist()
        mean = float(every[:, 1].mean())
        self.clock.wait("straggler", ready)
        self.clock.wait("latency", ready + LATENCY)
        self.clock.wait(kind, ready + LATENCY + mean / BANDWIDTH)
        self.clock.wait("uneven", ready + LATENCY + most / BANDWIDTH)

    def _clocks(self, away: float) -> Tensor:
        return self.transport.all_gather(torch.tensor([self.clock.now, away], dtype=torch.float64)).wait()

    def barrier(self) -> None:
        """Dense gradients: their sum waits for the slowest; how long it takes itself is the same in all cases."""
        self.clock.wait("straggler", float(self._clocks(0.0)[:, 0].max()))


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
        self.clock.join(self.done_at)
        return self.value


def draw_ids(random: np.random.Generator, count: int, exponent: float) -> np.ndarray:
    """Zipf, by the inverse of its continuous distribution."""
    draws = random.random(count)
    return ((1 + draws * (CATALOGUE ** (1 - exponent) - 1)) ** (1 / (1 - exponent))).astype(np.int64)


def plan(options: dict[str, Any], balanced: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Seconds [steps, ranks] of each rank's computation, its number of ids [steps, ranks], and the idle share by
    cost."""
    ranks, requests, steps = options["ranks"], options["requests"], options["steps"] + WARM
    seconds, counts = np.empty((steps, ranks)), np.empty((steps, ranks), np.int64)
    idle = []
    for step in range(steps):
        random = np.random.default_rng([step, ranks])
        lengths = draw_lengths(ranks * requests, random, options["length"])
        costs = cost_of(lengths)
        home = np.arange(len(lengths)) % ranks
        chosen = balance.equal_count(costs, ranks) if balanced else home
        taken = costs * random.uniform(1 - options["error"], 1 + options["error"], len(costs))
        load = balance.loads(taken, chosen, ranks)
        seconds[step] = COMPUTE_S * load / load.mean()
        idle.append(balance.idle(taken, chosen, ranks))
        tokens = balance.loads(lengths, chosen, ranks)
        counts[step] = np.maximum(1, np.rint(tokens / options["scale"]))
    return seconds, counts, float(np.mean(idle))


def draw(counts: np.ndarray, exponent: float) -> list[list[np.ndarray]]:
    """[step][rank] ids."""
    return [[draw_ids(np.random.default_rng([step, rank, 1]), count, exponent) for rank, count in enumerate(row)]
            for step, row in enumerate(counts.tolist())]


def in_common(ids: list[list[np.ndarray]]) -> float:
    """The share of a rank's rows that the step before used on any rank."""
    shares = []
    for before, batch in pairwise(ids):
        used = np.unique(np.concatenate(before))
        for part in batch:
            rows = np.unique(part)
            at = np.searchsorted(used, rows).clip(max=len(used) - 1)
            shares.append(float(np.mean(used[at] == rows)))
    return float(np.mean(shares))


def exponent_for(options: dict[str, Any]) -> float:
    """The popularity with which batches have the stated share of rows in common."""
    _, counts, _ = plan(options, balanced=True)
    low, high = 0.0, 0.999
    if not in_common(draw(counts[:2], low)) <= options["collisions"] <= in_common(draw(counts[:2], high)):
        raise ValueError(f"no popularity gives batches of {counts[0].sum():,} ids of {CATALOGUE:,} a share of "
                         f"{options['collisions']:.1%} in common; take another --scale or --collisions")
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if in_common(draw(counts[:2], middle)) < options["collisions"] else (low, middle)
    return (low + high) / 2


def numbered(ids: list[list[np.ndarray]]) -> tuple[list[list[Tensor]], int]:
    """The same ids as 0 .. n - 1."""
    known = np.unique(np.concatenate([part for step in ids for part in step]))
    order = np.random.default_rng(1).permutation(len(known))
    return [[torch.from_numpy(order[np.searchsorted(known, part)]) for part in step] for step in ids], len(known)


def naming(kind: type[Schedule[Any]], link: Clocked) -> type[Schedule[Any]]:
    """``kind`` that says whether rows or gradients are on their way."""

    class Named(kind):  # type: ignore[misc, valid-type]
        def _answer(self, *arguments: Any) -> None:
            link.kind = "rows"
            super()._answer(*arguments)

        def _give(self, *arguments: Any) -> None:
            link.kind = "gradients"
            super()._give(*arguments)

    return Named


def simulate(options: dict[str, Any], balanced: bool, kind: type[Schedule[Any]]) -> dict[str, Any]:
    seconds, counts, idle = plan(options, balanced)
    ids, rows = numbered(draw(counts, options["exponent"]))
    clocks = [Clock() for _ in range(options["ranks"])]
    by_thread: dict[int, Clock] = {}

    def rank(transport: Transport) -> float:
        clock = by_thread[threading.get_ident()] = clocks[transport.rank]
        link = Clocked(transport, clock, options["scale"], options["dim"])
        table = ShardedEmbedding(CARRIED, link, rows=rows, optimizer=RowWiseAdagrad(0.01))
        schedule = naming(kind, link)(table)
        own = [batch[transport.rank] for batch in ids]
        for step, (_, vectors) in enumerate(schedule(own, ids=lambda batch: batch)):
            for share in (FORWARD, 1 - FORWARD):
                clock.loop += share * seconds[step, transport.rank]
            vectors.grad = torch.zeros_like(vectors)
            schedule.step()
            link.barrier()
            clock.marks.append((clock.loop, *clock.waited))
        report = schedule.report.steps[WARM:]
        return sum(one.collisions for one in report) / max(sum(one.rows for one in report), 1)

    SimulatedWorker.clocks = by_thread
    with mock.patch.object(embedding_schedule, "Worker", SimulatedWorker):
        collisions = run_threads(options["ranks"], rank, timeout_s=1800.0)
    steps = len(clocks[0].marks)
    spans = np.array([clock.marks for clock in clocks])  # [ranks, steps, 1 + kinds]
    step_s, *waits = ((spans[:, -1] - spans[:, WARM - 1]).mean(0) / (steps - WARM)).tolist()
    split = dict(zip(KINDS, waits, strict=True))
    return {"step_s": step_s, "straggler_s": split["straggler"], "exposed_s": sum(split[name] for name in EXPOSED),
            "split_s": split, "bubbles": sum(waits) / step_s, "idle": idle, "collisions": float(np.mean(collisions))}


CASES = {"unbalanced, blocking": (False, Blocking), "balanced, blocking": (True, Blocking),
         "unbalanced, prioritized": (False, Prioritized), "balanced, prioritized": (True, Prioritized)}


def run(options: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    if options["exponent"] is None:
        options = {**options, "exponent": exponent_for(options)}
    cases = {name: simulate(options, *CASES[name]) for name in options["cases"]}
    before = cases[next(iter(CASES))]
    for case in cases.values():
        lost, was = case["step_s"] * case["bubbles"], before["step_s"] * before["bubbles"]
        case["less"] = 1 - lost / was
        case["faster"] = before["step_s"] / case["step_s"]
    return {**options, "cases": cases}


def show(result: dict[str, Any]) -> None:
    print(f"{result['ranks']} ranks x {result['requests']} requests, histories to {result['length']:,}; ids at "
          f"1/{result['scale']}, popularity ~ rank^-{result['exponent']:.3f}; requests take up to "
          f"{result['error']:.0%} more or less than modelled")
    print(f"simulated milliseconds, means of {result['steps']} step(s) and all ranks")
    print(f"  {'':26} {'step':>7} " + " ".join(f"{name:>9}" for name in (*KINDS, "exposed", "bubbles", "less"))
          + f" {'faster':>7} {'in common':>9}")
    for name, case in result["cases"].items():
        print(f"  {name:26} {1e3 * case['step_s']:7.1f} "
              + " ".join(f"{1e3 * case['split_s'][kind]:9.2f}" for kind in KINDS)
              + f" {1e3 * case['exposed_s']:9.2f} {case['bubbles']:9.2%} {case['less']:9.1%} {case['faster']:6.2f}x "
              f"{case['collisions']:9.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--length", type=int, default=21_000)
    parser.add_argument("--scale", type=int, default=100, help="one id stands for so many")
    parser.add_argument("--collisions", type=float, default=0.12, help="share of rows that the batch before used too")
    parser.add_argument("--exponent", type=float, help="of the items' popularity, below 1: instead of --collisions")
    parser.add_argument("--error", type=float, default=0.0,
                        help="by what share requests take more or less than the partition thinks, at most")
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--ends", action="store_true", help="only the first and the last case, which are compared")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    if min(arguments.ranks, arguments.requests, arguments.steps, arguments.scale) < 1:
        parser.error("--ranks, --requests, --steps and --scale must be at least 1")
    if not 0 <= arguments.error < 1:
        parser.error(f"--error is a share from 0 to below 1, got {arguments.error}")
    if arguments.exponent is not None and not 0 <= arguments.exponent < 1:
        parser.error(f"--exponent must be from 0 to below 1, got {arguments.exponent}")
    options = {name: value for name, value in vars(arguments).items() if name not in ("json", "ends")}
    names = list(CASES)
    try:
        result = run({**options, "cases": names[::len(names) - 1] if arguments.ends else names})
    except ValueError as error:
        parser.error(str(error))
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
