"""Exchange of whole requests between gloo processes: pointers or materialized histories, near or far.

    python -m benchmarks.exchange [--nproc 4] [--requests 64] [--steps 12] [--users 2000] [--mean 200] [--json FILE]

A store in a temporary folder, users with power-law histories, requests in the loader's window order (a user's requests
are neighbours), ``--nproc`` processes of two "hosts" each with ``--requests`` a rank and step. Each way of exchanging
takes its turn on every batch:

    none             each rank materializes what it has
    pointers         ``RequestRows`` move, the receiver reads the histories
    materialized     each rank reads its own, ``RequestBatch``es move

each with ``equal_cost`` over all ranks, with ``rebalance`` (as few as needed leave their rank), within hosts only, and
with the requests of a user together. Per step, medians: the slowest rank's time of exchange + materialization with
nothing to hide it behind; CPU time of all ranks; bytes between ranks; histories read; idle by modelled cost.

Then hidden, as in training: ``Exchange.balanced`` (pointers, ``rebalance``) against no exchange, turn about. A step
materializes, computes (here: waits, as for an accelerator) as long as its requests cost, ``--compute`` ms on average,
and ends when all ranks are done.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from benchmarks.late_materialization import ACTION, ITEM, WATCH, generate, make_rows, make_store
from semel.comm import join, spawn
from semel.comm.transport import transport
from semel.examples import materialize
from semel.examples.order import window_order
from semel.features import FeatureSpec
from semel.history import HistoryStore, Projection
from semel.training import balance
from semel.training.exchange import Exchange, history_lengths

FEATURES = FeatureSpec(history=(ITEM, WATCH, ACTION), history_last=4096)
PER_HOST = 2


def cost(lengths: np.ndarray, candidates: np.ndarray) -> np.ndarray:
    """Attention's: linear and, from about 2,000 events on, mostly quadratic."""
    return lengths + lengths**2 / 2000 + 10.0 * candidates


def within_hosts(costs: np.ndarray, world_size: int, home: np.ndarray, *, tokens: Any = None, token_cap: Any = None,
                 ) -> np.ndarray:
    return balance.within(np.arange(world_size) // PER_HOST, balance.equal_cost, costs, home, tokens=tokens,
                          token_cap=token_cap)


def ways() -> dict[str, tuple[str, Any, bool]]:
    """Name -> (what moves, partition, users together)."""
    out: dict[str, tuple[str, Any, bool]] = {"none": ("", None, False)}
    for moves in ("pointers", "materialized"):
        out[f"{moves}, equal_cost"] = moves, balance.equal_cost, False
        out[f"{moves}, rebalance"] = moves, balance.rebalance, False
        out[f"{moves}, within hosts"] = moves, within_hosts, False
        out[f"{moves}, users together"] = moves, balance.equal_cost, True
    return out


def rank_of(folder: Path, requests: int, steps: int, users: int, compute_ms: float) -> dict[str, list[dict[str, Any]]]:
    """One process: every way's figures, step by step."""
    world = join()
    torch.set_num_threads(1)
    with HistoryStore.open(folder / "store") as store:
        rows = make_rows(pa.ipc.open_file(folder / "events.arrow").read_all(), users * 5, store.version)
        codes, shards = np.unique(rows.pointers.user_id, return_inverse=True)[1], store.shards_of(rows.pointers.user_id)
        order = window_order(codes, shards, rows.pointers.as_of, 4096, 4, np.random.default_rng(0))
        lengths = history_lengths(store, Projection(("event_time",), last=FEATURES.history_last))
        exchanges: dict[str, Exchange[Any]] = {
            name: Exchange(transport(), partition, cost, lengths=lengths, users_together=together)
            for name, (_, partition, together) in ways().items() if partition is not None}
        make = partial(materialize, store=store, catalogue=None, features=FEATURES)
        out: dict[str, list[dict[str, Any]]] = {name: [] for name in ways()}
        for step in range(steps + 1):
            batch = order[step * requests * world.world_size :][: requests * world.world_size]
            part = rows.select(np.array_split(batch, world.world_size)[world.rank])
            for name, (moves, _, _) in ways().items():
                dist.barrier()
                began, worked = time.perf_counter(), time.process_time()
                report = None
                if moves == "pointers":
                    pending = exchanges[name].start(part)
                    make(pending.wait())
                    report = pending.report
                elif moves == "materialized":
                    pending = exchanges[name].start(make(part))
                    pending.wait()
                    report = pending.report
                else:
                    make(part)
                figures = {"seconds": time.perf_counter() - began, "cpu": time.process_time() - worked}
                if step:  # the first one warms up
                    out[name].append(figures | ({} if report is None else vars(report)))
        for exchange in exchanges.values():
            exchange.close()

        parts = [rows.select(np.array_split(batch, world.world_size)[world.rank])
                 for batch in np.array_split(order[: steps * requests * world.world_size], steps)]
        per_request = cost(lengths(rows), rows.candidates.lengths).mean()
        hidden = Exchange(transport(), balance.rebalance, cost, lengths=lengths)
        for turn in range(6):
            name = ("alone", "hidden")[turn % 2]
            dist.barrier()
            began = time.perf_counter()
            for part in hidden.balanced(parts) if name == "hidden" else parts:
                make(part)
                load = cost(lengths(part), part.candidates.lengths).sum() / (per_request * requests)
                time.sleep(1e-3 * compute_ms * load)
                dist.barrier()  # where gradients meet
                ended = time.perf_counter()
                out.setdefault(name, []).append({"seconds": ended - began, "load": load})
                began = ended
    return out


def run(nproc: int, requests: int, steps: int, users: int, mean: int, compute_ms: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="semel-benchmark-") as name:
        folder = Path(name)
        events = generate(users, mean)
        with pa.ipc.new_file(folder / "events.arrow", events.schema) as file:
            file.write_table(events)
        make_store(events, folder / "store").close()
        ranks = spawn(rank_of, nproc, folder, requests, steps, users, compute_ms)
    lines = []
    idle_before = float(np.median([step["idle_before"] for step in ranks[0]["pointers, equal_cost"]]))
    reads_before = float(np.median([step["reads_before"] for step in ranks[0]["pointers, equal_cost"]]))
    for way in ways():
        seconds = [max(of[way][i]["seconds"] for of in ranks) for i in range(steps)]
        first = ranks[0][way]

        def median(key: str, first: Any = first) -> float:
            return float(np.median([step[key] for step in first]))

        moved = way != "none"
        idle = median("idle_after") if moved else idle_before
        lines.append({
            "way": way, "ms": 1e3 * float(np.median(seconds)),
            "ms_middle_half": [1e3 * float(x) for x in np.percentile(seconds, (25, 75))],
            "cpu_ms": 1e3 * float(np.median([sum(of[way][i]["cpu"] for of in ranks) for i in range(steps)])),
            "bytes": median("moved_bytes") if moved else 0, "moved": median("moved") if moved else 0,
            "reads": reads_before if not moved or way.startswith("materialized") else median("reads_after"),
            "idle": idle})
    step = {name: [1e3 * float(x) for x in np.percentile([of["seconds"] for of in ranks[0][name]], (25, 50, 75))]
            for name in ("alone", "hidden")}
    of_step = {name: np.array([of["seconds"] for of in ranks[0][name]]).reshape(-1, steps).min(0) for name in step}
    loads = np.array([[of["load"] for of in rank["alone"][:steps]] for rank in ranks])
    return {"ways": lines, "step_ms": step, "bound": float(loads.max(0).sum() / loads.mean(0).sum()),
            "ratio": float(of_step["alone"].sum() / of_step["hidden"].sum())}


def show(result: dict[str, Any], nproc: int, requests: int) -> None:
    lines = result["ways"]
    print(f"{nproc} processes, {nproc * requests} requests a step")
    print("way".ljust(32) + "ms (middle half)".rjust(22) + "CPU ms".rjust(9) + "kB moved".rjust(10) + "moved".rjust(7)
          + "histories read".rjust(16) + "idle %".rjust(8))
    for line in lines:
        low, high = line["ms_middle_half"]
        print(f"{line['way']:32}" + f"{line['ms']:.1f} ({low:.1f}-{high:.1f})".rjust(22) + f"{line['cpu_ms']:9.1f}"
              f"{line['bytes'] / 1e3:10.1f}{line['moved']:7.0f}{line['reads']:16.0f}{100 * line['idle']:8.2f}")
    by_way = {line["way"]: line for line in lines}
    for partition in ("equal_cost", "rebalance", "within hosts", "users together"):
        pointers, whole = by_way[f"pointers, {partition}"], by_way[f"materialized, {partition}"]
        print(f"{partition}: histories on the wire are {whole['bytes'] / max(pointers['bytes'], 1):.0f}x the bytes and "
              f"{whole['ms'] / pointers['ms']:.2f}x the time of pointers, which read "
              f"{pointers['reads'] / whole['reads']:.2f}x the histories")
    low, middle, high = result["step_ms"]["alone"]
    print(f"step without exchange {middle:.1f} ms ({low:.1f}-{high:.1f}), ", end="")
    low, middle, high = result["step_ms"]["hidden"]
    print(f"with it hidden {middle:.1f} ms ({low:.1f}-{high:.1f}): all steps together, each at "
          f"its quietest, {result['ratio']:.2f}x faster (without any overhead: {result['bound']:.2f}x)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--requests", type=int, default=64, help="of a rank and step")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--users", type=int, default=2000)
    parser.add_argument("--mean", type=int, default=200, help="events a user")
    parser.add_argument("--compute", type=float, default=150.0, help="ms that a step computes on average")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = run(options.nproc, options.requests, options.steps, options.users, options.mean, options.compute)
    show(result, options.nproc, options.requests)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
