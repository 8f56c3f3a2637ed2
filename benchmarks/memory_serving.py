"""What a candidate of early ranking costs in a predictor that follows a memory, against one with a frozen cache.

    python -m benchmarks.memory_serving [--candidates 1000] [--rounds 15] [--calls 20] [--json]

``Predictor.prerank`` as ``/v1/prerank`` calls it: checks, history, exposures written beside it, the answer. 4,000
items, one candidate in a hundred without a row; the request's side is kept, so that the item side weighs most.
``memory``: rows from a log of deltas, vectors kept (``semel.serving.folding``); ``rows``: the same without keeping
vectors, so that each request reads the catalogue and joins rows with what is always on; ``frozen``: a table of vectors
that was filled once, a constant for a miss. Interleaved rounds of ``--calls`` requests each: median microseconds a
candidate, median ratio to ``frozen`` and the 95 % upper bound of it. Weights are untrained: that does not change time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import run_and_show
from benchmarks.memory import interleaved
from benchmarks.memory_loop import DIM, save
from benchmarks.serving import ITEMS, make_store
from benchmarks.sharing import upper_rank
from semel.memory import DeltaPublisher, ItemMemory
from semel.models.early_ranker import VECTOR
from semel.serving import Predictor
from semel.serving.item_side import ItemSide, Rows


class Frozen(ItemSide):
    """A table that a bulk job filled once."""

    def __init__(self, table: ItemMemory) -> None:
        super().__init__(None, None, True)
        self._table = table

    @contextmanager
    def rows(self, artifact: Any) -> Iterator[tuple[Rows, None]]:
        def looked_up(batch: Any, items: np.ndarray, version: Any) -> Any:
            vectors, found, _ = self._table.read(batch.candidate["item_id"])
            vectors = torch.where(found[:, None], vectors, -3.0)
            return replace(batch, candidate={**batch.candidate, VECTOR: vectors})

        yield looked_up, None


class RowByRow(ItemSide):
    """Rows and features of each request's candidates, joined for it."""

    def way(self, artifact: Any) -> Any:
        return "eager"


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    random = np.random.default_rng(0)
    make_store(folder / "store", 100)
    save(folder / "run", 0)
    memory = ItemMemory(2 * ITEMS, DIM)
    memory.write(np.arange(ITEMS), torch.randn(ITEMS, DIM))
    DeltaPublisher(memory, folder / "run" / "memory")
    known = random.permutation(ITEMS)[: arguments.candidates - arguments.candidates // 100]
    candidates = np.concatenate([known, ITEMS + np.arange(arguments.candidates - len(known))])
    random.shuffle(candidates)
    with ExitStack() as stack:
        predictors = {name: stack.enter_context(Predictor.load(folder / "run", folder / "store",
                                                               max_candidates=arguments.candidates))
                      for name in ("memory", "rows", "frozen")}
        table = ItemMemory(2 * ITEMS, DIM).eval()
        predictors["memory"].warm_up()
        table.write(np.arange(ITEMS), memory.read(np.arange(ITEMS))[0])
        predictors["frozen"]._item_side = Frozen(table)
        rows = predictors["rows"]
        rows._item_side = RowByRow(rows.catalogue, rows.memory, True)

        def call(name: str) -> Any:
            return lambda: predictors[name].prerank(0, candidates, as_of=10**15, limit=100)

        seconds = interleaved({name: call(name) for name in predictors}, arguments.rounds, arguments.calls)
    each = {name: statistics.median(v) / arguments.calls / arguments.candidates * 1e6 for name, v in seconds.items()}
    result: dict[str, Any] = {"microseconds_a_candidate": each, "ratio": {}, "upper_bound": {}}
    for name in ("memory", "rows"):
        ratios = sorted(a / b for a, b in zip(seconds[name], seconds["frozen"], strict=True))
        result["ratio"][name] = statistics.median(ratios)
        result["upper_bound"][name] = ratios[upper_rank(len(ratios)) - 1]
    return result


def show(result: dict[str, Any]) -> None:
    each = result["microseconds_a_candidate"]
    print(f"{'frozen':8} {each['frozen']:.3f} us a candidate")
    for name, ratio in result["ratio"].items():
        print(f"{name:8} {each[name]:.3f} us a candidate: {ratio:.2f}x, at most {result['upper_bound'][name]:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20, help="requests a round")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not (1 <= arguments.candidates <= ITEMS and arguments.rounds >= 6 and arguments.calls >= 1):
        parser.error(f"--candidates must be from 1 to {ITEMS}, --rounds 6 or more, --calls 1 or more")
    run_and_show(lambda folder: run(arguments, folder), show, arguments.json)


if __name__ == "__main__":
    main()
