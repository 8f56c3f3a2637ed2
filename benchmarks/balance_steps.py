"""Balance on real steps: what ``benchmarks.balance`` runs as its parts ``measured`` and ``processes``.

The step: forward and backward of one HSTU layer (32 wide) over a rank's jagged histories, whose lengths are a 32nd of
the benchmark's, on one core, in micro-batches of 16 requests (gradients are summed over them, as in accumulation).

``measured``: what a rank waits for the slowest is a matter of how long each rank's own work takes, and that can be
measured on one core: one process, pinned to it, computes the shares of all ranks one after another. Time is the
thread's CPU time, so that what else the machine does counts only as far as it slows the core down. Each micro-batch
is computed ``repeats`` times; between these all others are, in a new random order each time, so that slow seconds hit
all alike. Its time is the least of them, since a disturbance only ever adds, and a rank's the sum over its
micro-batches: some 25 ms are left in peace sooner than a whole share. Idle is 1 - mean / max of the ranks' times, as in
a step. A ``CostModel`` is fitted to micro-batches of *other* global batches first; partitions see only what it
predicts, and in the rows "±10 %" that times up to 10 % more or less, drawn for each request, in three draws, of which
the median counts; all under a cap of tokens that binds. ``one share, every time`` is the control: all ranks compute the
same requests, in between the others and timed like them: what it shows is noise. ``spread``: the standard deviation of
the ranks' times over their mean; where an assignment's is no larger than the control's, this machine cannot tell it
from one without any idle. 64 ranks x 128 requests take about four minutes of CPU time.

``processes``: real gloo processes. A balanced step gathers the lengths of all ranks, partitions, exchanges the
histories (all-to-all of their item ids; nothing of this is hidden here) and computes; an unbalanced one computes; both
all-reduce 1 MB of gradients. Where there are fewer cores than ranks, a rank sleeps for as long as 24 layers of its
share take, after one was measured alone (``replayed``).
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.balance import CUT, ERROR, draw_lengths
from semel.models.attention import AttentionPlan
from semel.models.config import EncoderConfig
from semel.models.hstu import HSTU
from semel.training import balance
from semel.training.cost import CostModel

SCALE = 32
"""By what lengths are divided."""
CLOCK, UNBALANCED = "one share, every time", "unbalanced"
CAPPED = "equal_count, cap"
WRONG = [f"{CAPPED}, ±10 %, draw {draw}" for draw in (1, 2, 3)]
MICRO = 16
"""Requests of a micro-batch."""
FITTED_ON = 48
"""Ranks' shares of other batches whose micro-batches the cost model is fitted to."""
LAYERS = 24
"""Of the model whose steps are replayed: so many times as long as the measured one."""
ITEMS = 10_000
CONFIG = EncoderConfig(dim=32, layers=1, heads=1, head_dim=32, dropout=0.0, positions=64, time=False)


class Step:
    """Forward and backward over some histories."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.items, self.encoder = torch.nn.Embedding(ITEMS, CONFIG.dim), HSTU(CONFIG)
        self.fixed = np.array([250, 100, 50])
        self._run(self.fixed)  # compiles
        self.unit = statistics.median(self._run(self.fixed) for _ in range(9))

    def __call__(self, values: np.ndarray, lengths: np.ndarray) -> None:
        offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        plan = AttentionPlan(offsets, offsets, causal=True, positions=CONFIG.positions)
        states, _ = self.encoder.request(self.items(torch.from_numpy(values)), plan)
        states.sum().backward()

    def _run(self, lengths: np.ndarray) -> float:
        values = np.arange(lengths.sum()) % ITEMS
        began = time.thread_time()
        self(values, lengths)
        return time.thread_time() - began

    def least(self, lengths: np.ndarray, repeats: int) -> float:
        return min(self._run(lengths) for _ in range(repeats)) if len(lengths) else 0.0

    def seconds(self, lengths: np.ndarray) -> float:
        """How long these take, on a machine that takes ``unit`` seconds for the fixed step."""
        if not len(lengths):
            return 0.0
        before, taken, after = self._run(self.fixed), self._run(lengths), self._run(self.fixed)
        return taken / (before + after) * 2 * self.unit


def draw(requests: int, random: np.random.Generator) -> np.ndarray:
    return np.maximum(draw_lengths(requests, random, CUT) // SCALE, 1)


def shares(step: Step, parts: dict[str, list[np.ndarray]], turns: int) -> dict[str, np.ndarray]:
    """The seconds of each rank's share (its lengths) under each assignment: the median of some turns."""
    taken = {name: np.empty((turns, len(ranks))) for name, ranks in parts.items()}
    for turn in range(turns):
        for rank in range(len(next(iter(parts.values())))):
            for name, ranks in parts.items():
                taken[name][turn, rank] = step.seconds(ranks[rank])
    return {name: np.median(seconds, axis=0) for name, seconds in taken.items()}


def by_rank(lengths: np.ndarray, ranks: np.ndarray, world_size: int) -> list[np.ndarray]:
    return [lengths[ranks == rank] for rank in range(world_size)]


def micro_batches(lengths: np.ndarray) -> list[np.ndarray]:
    return [lengths[start : start + MICRO] for start in range(0, len(lengths), MICRO)]


def fitted(step: Step, requests: int, steps: int) -> CostModel:
    """From unbalanced steps of other batches, as a trainer would."""
    model, random = CostModel(), np.random.default_rng(77)
    for _ in range(steps):
        for lengths in micro_batches(draw(requests, random)):
            model.observe(CostModel.features(lengths), step.least(lengths, 2))
    return model.fit()


def measured(world_size: int, requests: int, repeats: int) -> dict[str, Any]:
    """One global batch. ``times`` [repeats, ranks] of each assignment come along."""
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    gc.disable()
    try:
        step = Step()
        model = fitted(step, requests, FITTED_ON)
        random = np.random.default_rng(0)
        lengths = draw(world_size * requests, random)
        costs = model.predict(lengths)
        tokens = balance.loads(lengths, balance.equal_count(costs, world_size), world_size)
        cap = {"tokens": lengths, "token_cap": (tokens.max() + tokens.mean()) / 2}
        assignments = {UNBALANCED: np.arange(len(lengths)) % world_size,
                       CAPPED: balance.equal_count(costs, world_size, **cap)}
        for name in WRONG:
            wrong = costs * random.uniform(1 - ERROR, 1 + ERROR, len(costs))
            assignments[name] = balance.equal_count(wrong, world_size, **cap)
        parts = {name: by_rank(lengths, ranks, world_size) for name, ranks in assignments.items()}
        parts[CLOCK] = [parts[CAPPED][0]] * world_size
        work = [(name, rank, micro, part) for name in parts for rank in range(world_size)
                for micro, part in enumerate(micro_batches(parts[name][rank]))]
        taken = {name: np.zeros((repeats, world_size, -(-requests // MICRO))) for name in parts}
        for turn in range(repeats):
            for at in random.permutation(len(work)):
                name, rank, micro, part = work[at]
                taken[name][turn, rank, micro] = step._run(part)
            gc.collect()
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)
    rows = []
    for name, seconds in taken.items():
        least, everyone = seconds.min(axis=0).sum(axis=1), np.arange(world_size)
        same = name == CLOCK
        once = [balance.idle(one.sum(axis=1), everyone, world_size) for one in seconds]
        rows.append({
            "partition": name, "idle_tokens": 0.0 if same else balance.idle(lengths, assignments[name], world_size),
            "idle_cost": 0.0 if same else balance.idle(costs, assignments[name], world_size),
            "idle_time": balance.idle(least, everyone, world_size),
            "idle_once_low": min(once), "idle_once_high": max(once), "slowest_ms": 1e3 * float(least.max()),
            "spread": float(least.std() / least.mean())})
    return {"ranks": world_size, "requests": requests, "repeats": repeats, "model": model.describe(), "rows": rows,
            "times": {name: seconds.sum(axis=2).tolist() for name, seconds in taken.items()}}


def rank_main(rank: int, world_size: int, requests: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    plan = torch.load(f"{folder}/plan.pt", weights_only=True)
    model, replayed = CostModel.from_json(plan["model"]), plan["seconds"]
    step = None if replayed is not None else Step()
    gradients = torch.zeros(250_000)
    times: dict[str, list[float]] = {"unbalanced": [], "balanced": []}
    for number in range(rounds):
        lengths = draw(world_size * requests, np.random.default_rng(number))
        own = torch.from_numpy(lengths[rank * requests : (rank + 1) * requests])
        values = torch.arange(int(own.sum())) % ITEMS
        for name in ("unbalanced", "balanced") if number % 2 else ("balanced", "unbalanced"):
            dist.barrier()
            began = time.perf_counter()
            mine, history = own, values
            if name == "balanced":
                mine, history = exchange(model, own, values, rank, world_size)
            if step is None:
                time.sleep(LAYERS * float(replayed[number][name][rank]))
            else:
                step(history.numpy(), mine.numpy())
            dist.all_reduce(gradients)
            times[name].append(time.perf_counter() - began)
    if rank == 0:
        torch.save({name: torch.tensor(values) for name, values in times.items()}, f"{folder}/times.pt")
    dist.barrier()
    dist.destroy_process_group()


def exchange(model: CostModel, own: torch.Tensor, values: torch.Tensor, rank: int,
             world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Lengths of all, the partition, and the histories of this rank's share."""
    every = [torch.empty_like(own) for _ in range(world_size)]
    dist.all_gather(every, own)
    lengths = torch.cat(every).numpy()
    reader = np.repeat(np.arange(world_size), len(own))
    ranks = balance.equal_count(model.predict(lengths), world_size)
    leave = np.argsort(ranks[reader == rank], kind="stable")  # own requests by destination
    offsets = np.concatenate([[0], np.cumsum(own.numpy())])
    sent = torch.cat([values[offsets[i] : offsets[i + 1]] for i in leave]) if len(leave) else values[:0]
    send = balance.loads(own.numpy(), ranks[reader == rank], world_size).astype(int).tolist()
    receive = balance.loads(lengths[ranks == rank], reader[ranks == rank], world_size).astype(int).tolist()
    got = sent.new_empty(sum(receive))
    dist.all_to_all_single(got, sent, receive, send)
    return torch.from_numpy(lengths[ranks == rank]), got


def processes(quick: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    step = Step()
    cores = len(os.sched_getaffinity(0))
    rows = []
    model = fitted(step, 8, 16 if quick else FITTED_ON)
    for world_size, requests in ((2, 4),) if quick else ((2, 8), (4, 8), (4, 16)):
        rounds = 3 if quick else 9
        replayed = None
        if cores < world_size:
            replayed = []
            for number in range(rounds):
                lengths = draw(world_size * requests, np.random.default_rng(number))
                assignments = {"unbalanced": np.repeat(np.arange(world_size), requests),
                               "balanced": balance.equal_count(model.predict(lengths), world_size)}
                taken = shares(step, {name: by_rank(lengths, ranks, world_size)
                                      for name, ranks in assignments.items()}, 2)
                replayed.append({name: torch.from_numpy(seconds) for name, seconds in taken.items()})
        with tempfile.TemporaryDirectory(prefix="semel-benchmark-") as folder:
            torch.save({"model": model.to_json(), "seconds": replayed}, f"{folder}/plan.pt")
            mp.spawn(rank_main, (world_size, requests, rounds, folder), nprocs=world_size)
            times = {name: values.numpy() for name, values in torch.load(Path(folder) / "times.pt",
                                                                         weights_only=True).items()}
        skip = 1  # the first round compiles
        ratios = np.sort(times["unbalanced"][skip:] / times["balanced"][skip:])
        rows.append({"ranks": world_size, "requests": requests, "rounds": rounds - skip,
                     "compute": "real" if replayed is None else "replayed",
                     "unbalanced_ms": 1e3 * float(np.median(times["unbalanced"][skip:])),
                     "balanced_ms": 1e3 * float(np.median(times["balanced"][skip:])),
                     "ratio": float(times["unbalanced"][skip:].sum() / times["balanced"][skip:].sum()),
                     "ratio_low": float(ratios[len(ratios) // 4]), "ratio_high": float(ratios[-len(ratios) // 4])})
    return rows


def show(result: dict[str, Any]) -> None:
    if "measured" in result:
        one = result["measured"]
        print(f"\nmeasured steps: {one['ranks']} ranks x {one['requests']} requests, each micro-batch of {MICRO} "
              f"alone, the least of {one['repeats']} times")
        print(f"  {one['model']}")
        print(f"  {'partition':32}{'tokens':>9}{'cost':>10}{'time':>9}{'(timed once)':>16}{'spread':>9}{'slowest':>13}")
        for row in one["rows"]:
            once = f"{100 * row['idle_once_low']:.1f}-{100 * row['idle_once_high']:.1f}"
            print(f"  {row['partition']:32}{100 * row['idle_tokens']:8.2f}%{100 * row['idle_cost']:9.3f}%"
                  f"{100 * row['idle_time']:8.2f}%{once:>16}{100 * row['spread']:8.2f}%{row['slowest_ms']:10.1f} ms")
    if "processes" in result:
        print("\ngloo processes, wall clock a step, in turns")
        for row in result["processes"]:
            print(f"  {row['ranks']} ranks x {row['requests']:3} requests, compute {row['compute']:9}"
                  f"unbalanced {row['unbalanced_ms']:8.1f} ms   balanced {row['balanced_ms']:8.1f} ms   "
                  f"ratio {row['ratio']:.2f} (quartiles of steps {row['ratio_low']:.2f}-{row['ratio_high']:.2f})")
