"""Balance on real steps: what ``benchmarks.balance`` runs as its parts ``measured`` and ``processes``.

The step: forward and backward of one HSTU layer (32 wide) over a rank's jagged histories, whose lengths are a sixteenth
of the benchmark's, on one core.

``measured``: one process computes the shares of all ranks in turn, so that one core stands for many ranks. A share's
CPU time is counted in runs of one fixed step right before and after it, since a machine is not equally fast all the
time; the median of some turns. A ``CostModel`` is fitted to the unbalanced steps of other batches first; partitions see
only what it predicts. ``one share, every time``: what idle the clock shows where there is none.

``processes``: real gloo processes. A balanced step gathers the lengths of all ranks, partitions, exchanges the
histories (all-to-all of their item ids; nothing of this is hidden here) and computes; an unbalanced one computes; both
all-reduce 1 MB of gradients. Where there are fewer cores than ranks, a rank sleeps for as long as 24 layers of its
share take, after one was measured alone (``replayed``).
"""

from __future__ import annotations

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

from benchmarks.balance import CUT, draw_lengths
from semel.models.attention import AttentionPlan
from semel.models.config import EncoderConfig
from semel.models.hstu import HSTU
from semel.training import balance
from semel.training.cost import CostModel, IdleReport

SCALE = 16
"""By what lengths are divided."""
CLOCK = "one share, every time"
"""Every rank computes the same requests: what idle the clock shows where there is none."""
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
        began = time.process_time()
        self(values, lengths)
        return time.process_time() - began

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


def fitted(step: Step, world_size: int, requests: int, steps: int) -> CostModel:
    """From unbalanced steps, as a trainer would."""
    model, random = CostModel(), np.random.default_rng(77)
    for _ in range(steps * world_size):
        lengths = draw(requests, random)
        model.observe(CostModel.features(lengths), step.seconds(lengths))
    return model.fit()


def measured(quick: bool) -> dict[str, Any]:
    world_size, requests, batches, turns = (8, 8, 1, 2) if quick else (64, 32, 1, 4)
    torch.set_num_threads(1)
    step = Step()
    model = fitted(step, world_size, requests, 4 if quick else 2)
    found: dict[str, list[dict[str, float]]] = {}
    for batch in range(batches):
        lengths = draw(world_size * requests, np.random.default_rng(batch))
        home, costs = np.arange(len(lengths)) % world_size, model.predict(lengths)
        free = balance.equal_count(costs, world_size)
        tokens = balance.loads(lengths, free, world_size)
        cap = {"tokens": lengths, "token_cap": (tokens.max() + tokens.mean()) / 2}
        assignments = {
            "unbalanced": home, "zigzag": balance.zigzag(costs, world_size),
            "karmarkar_karp": balance.karmarkar_karp(costs, world_size),
            "equal_count, cap": balance.equal_count(costs, world_size, **cap),
            "rebalance": balance.rebalance(costs, world_size, home),
        }
        parts = {name: by_rank(lengths, ranks, world_size) for name, ranks in assignments.items()}
        parts[CLOCK] = [lengths[free == 0]] * world_size
        for name, seconds in shares(step, parts, turns).items():
            report = IdleReport.of(lengths, costs, assignments[name], world_size, seconds) if name != CLOCK else (
                IdleReport(0.0, 0.0, balance.idle(seconds, np.arange(world_size), world_size)))
            found.setdefault(name, []).append({
                "idle_tokens": report.tokens, "idle_cost": report.cost, "idle_time": report.time or 0.0,
                "slowest_ms": 1e3 * float(seconds.max())})
    rows = [{"partition": name, **{key: statistics.median(one[key] for one in every) for key in every[0]},
             "idle_time_low": min(one["idle_time"] for one in every),
             "idle_time_high": max(one["idle_time"] for one in every)} for name, every in found.items()]
    return {"ranks": world_size, "requests": requests, "batches": batches, "model": model.describe(), "rows": rows}


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
    model = fitted(step, 8, 8, 2 if quick else 6)
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
        print(f"\nmeasured steps: {one['ranks']} ranks x {one['requests']} requests, medians of {one['batches']}")
        print(f"  {one['model']}")
        print(f"  {'partition':24}{'tokens':>9}{'cost':>10}{'time':>9}{'(range)':>14}{'slowest':>13}")
        for row in one["rows"]:
            spread = f"{100 * row['idle_time_low']:.1f}-{100 * row['idle_time_high']:.1f}"
            print(f"  {row['partition']:24}{100 * row['idle_tokens']:8.2f}%{100 * row['idle_cost']:9.3f}%"
                  f"{100 * row['idle_time']:8.2f}%{spread:>14}{row['slowest_ms']:10.1f} ms")
    if "processes" in result:
        print("\ngloo processes, wall clock a step, in turns")
        for row in result["processes"]:
            print(f"  {row['ranks']} ranks x {row['requests']:3} requests, compute {row['compute']:9}"
                  f"unbalanced {row['unbalanced_ms']:8.1f} ms   balanced {row['balanced_ms']:8.1f} ms   "
                  f"ratio {row['ratio']:.2f} (quartiles of steps {row['ratio_low']:.2f}-{row['ratio_high']:.2f})")
