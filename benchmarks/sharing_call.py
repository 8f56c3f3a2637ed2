"""What a call of a shared model costs before the unmodified model runs, where that is the way taken: microseconds.

    python -m benchmarks.sharing_call [--fields 100] [--parameters 200] [--pairs 101] [--json]

One request with one candidate (there the original is often the fastest way). The model does next to nothing, holds
``--parameters`` small parameters, and takes its fields in one of three ways: as columns of one wide matrix, as one
tensor each, or as one dict. ``model`` is the model itself on the inputs as it wants them, ``call`` is
``shared(request, candidate, offsets)``; ``extra`` is their difference, the median over interleaved pairs, with the 95 %
upper bound. Times are CPU time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sharing import upper_rank
from semel.sharing import share
from semel.sharing.choice import Choice
from semel.sharing.runtime import ORIGINAL

REPEATS = 20    # of a call, between two looks at the clock


class Small(nn.Module):
    """Adds up a field of each side; its parameters are there to be held."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(parameters)])


class Matrix(Small):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0] + x[:, -1]


class Separate(Small):
    def forward(self, *fields: Tensor) -> Tensor:
        return fields[0] + fields[-1]


class Named(Small):
    def forward(self, fields: dict[str, Tensor]) -> Tensor:
        return fields["field0"] + fields[f"field{len(fields) - 1}"]


def inputs(kind: str, fields: int, rows: int) -> tuple[Any, ...]:
    if kind == "matrix":
        return (torch.ones(rows, fields),)
    tensors = [torch.ones(rows) for _ in range(fields)]
    return tuple(tensors) if kind == "separate" else ({f"field{i}": x for i, x in enumerate(tensors)},)


def measured(kind: str, fields: int, parameters: int, pairs: int) -> dict[str, float]:
    """Four fifths of the fields are the request's."""
    model = {"matrix": Matrix, "separate": Separate, "named": Named}[kind](parameters).eval()
    mine = fields * 4 // 5
    row = inputs(kind, fields, 1)
    request: dict[str, Any]
    candidate: dict[str, Any]
    if kind == "matrix":
        names: Any = {"x": [*range(0, mine - 1), fields - 1]}
        request, candidate = {"x": torch.ones(1, mine)}, {"x": torch.ones(1, fields - mine)}
    elif kind == "separate":
        names = [f"fields.{i}" for i in range(mine)]
        request = {name: row[i] for i, name in enumerate(names)}
        candidate = {f"fields.{i}": row[i] for i in range(mine, fields)}
    else:
        names = [f"fields.field{i}" for i in range(mine)]
        request = {"fields": {f"field{i}": row[0][f"field{i}"] for i in range(mine)}}
        candidate = {"fields": {f"field{i}": row[0][f"field{i}"] for i in range(mine, fields)}}
    shared = share(model, inputs(kind, fields, 4), request_inputs=names, candidates_hint=1)
    shared.choices = {("call", False): (Choice(1, ORIGINAL, {}),)}
    offsets = torch.tensor([0, 1])
    times = alternately([lambda: model(*row), lambda: shared(request, candidate, offsets)], pairs)
    extra = sorted(call - alone for alone, call in zip(*times, strict=True))
    return {"model_us": statistics.median(times[0]), "call_us": statistics.median(times[1]),
            "extra_us": statistics.median(extra), "extra_us_bound": extra[upper_rank(len(extra)) - 1]}


@torch.no_grad()
def alternately(calls: list[Callable[[], Any]], pairs: int) -> list[list[float]]:
    """Microseconds of a call, pair by pair; of this thread's work, so that other work of the machine does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(pairs + 5):
        for number in (0, 1) if i % 2 else (1, 0):
            call = calls[number]
            start = time.thread_time()
            for _ in range(REPEATS):
                call()
            times[number].append(1e6 * (time.thread_time() - start) / REPEATS)
    return [values[5:] for values in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fields", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=101)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.fields < 5 or arguments.pairs < 5 or arguments.parameters < 1:
        parser.error("--fields and --pairs must be at least 5, --parameters at least 1")
    rows = {kind: measured(kind, arguments.fields, arguments.parameters, arguments.pairs)
            for kind in ("matrix", "separate", "named")}
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{arguments.fields} fields, {arguments.parameters} parameters, one candidate, microseconds a call")
    print(f"{'':10} {'model':>8} {'call':>8} {'extra':>8} {'bound':>8}")
    for kind, row in rows.items():
        print(f"{kind:10} " + " ".join(f"{row[key]:8.1f}" for key in ("model_us", "call_us", "extra_us",
                                                                       "extra_us_bound")))


if __name__ == "__main__":
    main()
