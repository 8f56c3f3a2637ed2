"""How much faster rDCN scores a request than DCN V2 of the same width: the interaction alone, without tables.

    python -m benchmarks.rdcn [--candidates 1 16 128 512 2048] [--rounds 15] [--json]

1,600 request and 160 candidate units, 3 cross layers beside a deep network of 512-256, one logit. DCN V2 gets the
request's units copied to every candidate, which is how it is usually run. rDCN's time with its request side, and with
the request's state kept, so that candidates are all there is to compute. Eager, one request, interleaved rounds,
medians; FLOPs are of matrix products.
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

from semel.models.dcn import CrossNet, RDCNCrossNet
from semel.models.flops import count
from semel.models.heads import mlp
from semel.models.isolated import IsolatedHead, IsolatedMLP, Sides

WIDTHS = Sides(1600, 160)
LAYERS, HIDDEN = 3, (512, 256)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cross = CrossNet(WIDTHS.total, LAYERS)
        self.deep = mlp([WIDTHS.total, *HIDDEN])
        self.head = nn.Linear(WIDTHS.total + HIDDEN[-1], 1)

    def forward(self, request: Tensor, candidate: Tensor, owner: Tensor) -> Tensor:
        x = torch.cat([request[owner], candidate], -1)
        return self.head(torch.cat([self.cross(x), torch.relu(self.deep(x))], -1))


class Isolated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden = [WIDTHS.share(units) for units in HIDDEN]
        self.cross = RDCNCrossNet(WIDTHS, LAYERS)
        self.deep = IsolatedMLP([WIDTHS, *hidden])
        self.head = IsolatedHead(WIDTHS.plus(hidden[-1]), (), 1, 0.0)

    def request(self, x: Tensor) -> list[Any]:
        crossed, cross = self.cross.request(x)
        hidden, deep = self.deep.request(x)
        return [cross, deep, self.head.request(torch.cat([crossed, torch.relu(hidden)], -1))[1]]

    def score(self, state: list[Any], x: Tensor, owner: Tensor) -> Tensor:
        cross, deep, head = state
        hidden = torch.relu(self.deep.candidate(x, deep, owner))
        return self.head.candidate(torch.cat([self.cross.candidate(x, cross, owner), hidden], -1), head, owner)

    def forward(self, request: Tensor, candidate: Tensor, owner: Tensor) -> Tensor:
        return self.score(self.request(request), candidate, owner)


def medians(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of each, measured in turns."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - started)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def run(candidates: list[int], rounds: int) -> list[dict[str, float]]:
    torch.manual_seed(0)
    plain, isolated = Plain().eval(), Isolated().eval()
    rows = []
    with torch.inference_mode():
        for n in candidates:
            request, candidate = torch.randn(1, WIDTHS.request), torch.randn(n, WIDTHS.candidate)
            owner = torch.zeros(n, dtype=torch.int64)
            state = isolated.request(request)
            steps: dict[str, Callable[[], Any]] = {
                "plain": lambda r=request, c=candidate, o=owner: plain(r, c, o),
                "request": lambda r=request, c=candidate, o=owner: isolated(r, c, o),
                "state": lambda s=state, c=candidate, o=owner: isolated.score(s, c, o),
            }
            row: dict[str, float] = {"candidates": n}
            for name, seconds in medians(steps, rounds).items():
                row[f"{name}_ms"], row[f"{name}_flops"] = 1e3 * seconds, count(steps[name])
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 16, 128, 512, 2048])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(arguments.candidates, arguments.rounds)
    if arguments.json:
        print(json.dumps(rows))
        return
    print("| candidates | DCN V2 ms | rDCN ms | ratio | state kept ms | ratio | FLOPs ratio |\n|" + "---|" * 7)
    for row in rows:
        base = row["plain_ms"]
        print(f"| {row['candidates']} | {base:.2f} | {row['request_ms']:.2f} | {base / row['request_ms']:.1f}x | "
              f"{row['state_ms']:.2f} | {base / row['state_ms']:.1f}x | "
              f"{row['plain_flops'] / row['request_flops']:.1f}x |")


if __name__ == "__main__":
    main()
