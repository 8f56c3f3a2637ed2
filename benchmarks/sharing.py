"""Request sharing against serving a ranker naively, on models that nobody here wrote.

    python -m benchmarks.sharing [--models own deepctr.DCN-matrix] [--sizes 1 16 128 512 2048 16384] [--compiled]
                                 [--pairs 15] [--json [FILE] [--resume] [--limit 1800]] [--quick]

One request with N candidates, and one ragged case (five requests, one of them empty, N candidates in all: ``--ragged``
N). Columns, all in the same runtime, eager or (``--compiled``) ``torch.compile``:

    naive    the unmodified model on request inputs repeated for every candidate; repeating them is not counted
    tile     the same with the request's embeddings looked up once ("input tile"); "-" where the model has none apart
    shared   ``shared(request, candidates, offsets)``: the request side is computed in the call
    cached   ``shared.score(state, candidates, offsets)``: it was computed before

Rounds are interleaved: each runs every column once, in turning order, after two rounds that are thrown away. Ratios
are naive over column, medians of the rounds' ratios. ``slower`` is the 95 % upper bound of shared over naive, from
order statistics of the rounds: no assumption on how times are distributed (``extra_us`` in the JSON: the median of
their difference in microseconds, ``way``: the one taken). FLOPs by ``torch.utils.flop_counter``. The
difference is the largest one from the unmodified model, in float32 over the output's scale and in float64 as it is.
With ``--json FILE`` each model runs in a process of its own, for at most ``--limit`` seconds, and FILE is written after
each; ``--resume`` goes on where a run with the same work was stopped. What did not come to its end keeps the rows that
it had, and is named; the means are printed over those with a number, and with the others taken as 1.0x.
Last line: DCNv2 with 1,600 request and 160 candidate dimensions, exact, its towers behind the cross layers (stacked)
and beside them (parallel, with a linear readout), and with rows of the request that never see the candidate (rDCN,
another model).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.apart import run_apart, write_whole
from benchmarks.input_tile import InputTile
from benchmarks.sharing_report import HEADER, line, show, summary
from benchmarks.zoo import chosen, zoo
from benchmarks.zoo_model import ZooModel, broadcast, split_inputs
from semel.sharing import SharingError, share
from semel.sharing.choice import SIZES as CHOSEN

SIZES = (1, 16, 128, 512, 2048, 16384)
STATED = 512                # candidates for which the means are printed
LARGEST_BYTES = 4 << 30     # of one naive call's values; more candidates are scored in several calls
Timed = dict[str, Callable[[], Any]]


def scores_of(out: Any) -> Tensor:
    """Models with an auxiliary loss return it second."""
    return out[0] if isinstance(out, (tuple, list)) else out


def upper_rank(rounds: int, confidence: float = 0.95) -> int:
    """1-based rank of the order statistic that bounds the median from above with ``confidence``.

    P(median <= x_(k)) = P(Binomial(rounds, 1/2) <= k - 1); with few rounds (under 5) no rank reaches 0.95: the last.
    """
    below = 0.0
    for k in range(1, rounds + 1):
        below += math.comb(rounds, k - 1) / 2**rounds
        if below >= confidence:
            return k
    return rounds


def interleaved(columns: Timed, rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds a call, round by round. Fewer than ``rounds`` only where they would take longer than ``seconds``."""
    for call in columns.values():       # the first call may compile
        call()
    started = time.perf_counter()
    for call in columns.values():
        call()
    one = time.perf_counter() - started
    repeats = max(1, min(50, int(2e-3 * len(columns) / max(one, 1e-9))))    # a clock tick and a cache are not the model
    rounds = max(3, min(rounds, int(seconds / max(one * repeats, 1e-9))))
    times: dict[str, list[float]] = {name: [] for name in columns}
    order = list(columns)
    for i in range(rounds + 2):
        for name in order[i % len(order):] + order[:i % len(order)]:
            call = columns[name]
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            times[name].append((time.perf_counter() - started) / repeats)
    return {name: values[2:] for name, values in times.items()}


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def in_pieces(call: Callable[..., Any], inputs: tuple[Any, ...], rows: int, piece: int) -> Callable[[], Any]:
    """``call`` on ``piece`` rows at a time: how a model whose values would not fit is served."""
    if rows <= piece:
        return lambda: call(*inputs)
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(inputs)
    parts = [pytree.tree_unflatten([x[i:i + piece] for x in leaves], spec) for i in range(0, rows, piece)]
    return lambda: torch.cat([scores_of(call(*part)) for part in parts])


def largest_piece(model: ZooModel) -> int:
    """Candidates of one naive call whose values fit into ``LARGEST_BYTES``, from all outputs of operators at 8 rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, Tensor) and tensor.dim() and len(tensor) == 8:
                    self.largest = max(self.largest, tensor.numel() * tensor.element_size() // 8)
            return out

    with Sizes() as sizes:
        model.module(*model.example_inputs(8))
    return max(256, LARGEST_BYTES // max(1, 4 * sizes.largest))


def sizes_of_requests(candidates: int, ragged: bool) -> Tensor:
    """Offsets: one request, or five of which the fourth has no candidate."""
    if not ragged:
        return torch.tensor([0, candidates])
    parts = torch.tensor([0.0, 0.1, 0.5, 0.7, 0.7, 1.0])
    return (parts * candidates).round().long()


def compiled(call: Callable[..., Any], on: bool) -> Callable[..., Any]:
    return torch.compile(call, dynamic=True) if on else call


def tile_of(model: ZooModel) -> InputTile | None:
    """None: no lookup belongs to the request alone, or the model does not export."""
    try:
        tile = InputTile(model)
    except Exception:  # whatever export raises: the column is left out
        return None
    return tile if tile.lookups else None


class Compared:
    """One model in its four forms. Forms are made once and used at every number of candidates."""

    def __init__(self, model: ZooModel, compile_both: bool, candidates: int = STATED, fewest: int = 1,
                 tiled: bool = True) -> None:
        self.model = model
        started = time.perf_counter()
        self.shared = share(model.module, model.example_inputs(4), request_inputs=model.request_inputs,
                            candidates_hint=candidates)
        self.share_seconds = time.perf_counter() - started
        self.tile = tile_of(model) if tiled else None
        self.piece = largest_piece(model)
        self.run_naive = compiled(model.module, compile_both)
        self.run_tile = compiled(self.tile, compile_both) if self.tile else None
        if compile_both:
            self.shared.compile()
            # the ways again, compiled; not for numbers far below those that are measured
            self.shared.choose([size for size in (*CHOSEN, candidates) if size <= candidates and 8 * size > fewest])
        self.run_shared = self.shared
        self.run_score = self.shared.score

    def case(self, candidates: int, ragged: bool) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
        offsets = sizes_of_requests(candidates, ragged)
        request, _ = split_inputs(self.model, self.model.example_inputs(len(offsets) - 1, seed=1))
        _, candidate = split_inputs(self.model, self.model.example_inputs(candidates, seed=2))
        return request, candidate, offsets

    def columns(self, candidates: int, ragged: bool) -> Timed:
        request, candidate, offsets = self.case(candidates, ragged)
        inputs = broadcast(self.model, request, candidate, offsets)
        state = self.shared.request(request)
        columns: Timed = {"naive": in_pieces(self.run_naive, inputs, candidates, self.piece)}
        if self.tile and self.run_tile and candidates <= self.piece:
            tile, planned = self.run_tile, self.tile.plan(inputs, offsets)
            columns["tile"] = lambda: tile(*planned)
        columns["shared"] = lambda: self.run_shared(request, candidate, offsets)
        columns["cached"] = lambda: self.run_score(state, candidate, offsets)
        return columns

    @torch.no_grad()
    def measure(self, candidates: int, ragged: bool, rounds: int, seconds: float) -> dict[str, Any]:
        columns = self.columns(candidates, ragged)
        if candidates == 1 and not self.model.batch_of_one:
            columns = {name: columns[name] for name in ("shared", "cached")}    # the unmodified model fails there
        row: dict[str, Any] = {"candidates": candidates, "ragged": ragged}
        row["ms"], row["flops"], row["speed_up"], row["slower_bound"], row["extra_us"] = {}, {}, {}, {}, {}
        row["way"] = self.shared.way(5 if ragged else 1, candidates, "call")
        if "naive" in columns:
            expected = scores_of(columns["naive"]())
            got = scores_of(columns["shared"]())
            row["relative_difference"] = float((got - expected).abs().max() / expected.abs().max())
        times = interleaved(columns, rounds, seconds)
        for name, values in times.items():
            row["ms"][name] = 1e3 * statistics.median(values)
            if self.run_naive is self.model.module:     # the counter counts what runs eagerly
                row["flops"][name] = flops(columns[name])
            if "naive" in times and name != "naive":
                ratios = sorted(x / n for x, n in zip(values, times["naive"], strict=True))
                row["speed_up"][name] = 1 / statistics.median(ratios)
                row["slower_bound"][name] = ratios[upper_rank(len(ratios)) - 1]
                extra = [1e6 * (x - n) for x, n in zip(values, times["naive"], strict=True)]
                row["extra_us"][name] = statistics.median(extra)
        row["rounds"] = len(values)
        row["scores_per_second"] = {name: 1e3 * candidates / ms for name, ms in row["ms"].items()}
        return row


@torch.no_grad()
def float64_difference(model: ZooModel, candidates: int) -> float | None:
    """Largest difference in float64, one request and ragged; None where the model hard-codes float32. Keeps float64."""
    if not model.float64:
        return None
    model = model.double()
    shared = share(model.module, model.example_inputs(4), request_inputs=model.request_inputs,
                   candidates_hint=candidates)
    worst = 0.0
    for ragged in (False, True):
        offsets = sizes_of_requests(candidates, ragged)
        request, _ = split_inputs(model, model.example_inputs(len(offsets) - 1, seed=1))
        _, candidate = split_inputs(model, model.example_inputs(candidates, seed=2))
        expected = scores_of(model.module(*broadcast(model, request, candidate, offsets)))
        got = scores_of(shared(request, candidate, offsets))
        worst = max(worst, float((got - expected).abs().max()))
    return worst


def stated(arguments: argparse.Namespace) -> int:
    """Candidates for which the models are shared and the means are taken."""
    return STATED if STATED in arguments.sizes else max(arguments.sizes)


def examine(build: Callable[[], ZooModel], arguments: argparse.Namespace,
            say: Callable[[dict[str, Any]], None] = lambda result: None) -> dict[str, Any]:
    """All sizes of one model, or the reason why it cannot be shared. ``say`` gets the result as it grows."""
    model = build()
    try:
        both = Compared(model, arguments.compiled, stated(arguments), min(arguments.sizes), not arguments.no_tile)
    except SharingError as error:
        return {"refused": " ".join(str(error).split())}
    lookups = both.tile.lookups if both.tile else 0
    result: dict[str, Any] = {"share_seconds": both.share_seconds, "lookups_once": lookups, "rows": []}
    say(result)
    cases = [(n, False) for n in arguments.sizes] + [(n, True) for n in arguments.ragged]
    for candidates, ragged in cases:
        result["rows"].append(both.measure(candidates, ragged, arguments.pairs, arguments.seconds))
        say(result)
    if not arguments.no_float64:
        result["float64_difference"] = float64_difference(model, min(128, stated(arguments)))
    return result


@torch.no_grad()
def cross_network(models: dict[str, Callable[[], ZooModel]], arguments: argparse.Namespace) -> dict[str, Any]:
    """At ``STATED`` candidates, interleaved in one run: DCNv2 exact, its towers behind the cross layers and beside
    them, each against itself unmodified; rDCN against DCNv2 with its towers behind."""
    candidates = stated(arguments)
    columns: Timed = {}
    for name, model in (("", "own.DCNv2"), ("parallel ", "own.ParallelDCNv2"), ("rDCN", "own.RDCN")):
        one = Compared(models[model](), arguments.compiled, candidates, candidates, False).columns(candidates, False)
        kind = name if name == "rDCN" else name + "exact"
        columns |= {f"{name}naive": one["naive"]} if name != "rDCN" else {}
        columns |= {kind: one["shared"], f"{kind}, cached": one["cached"]}
    times = interleaved(columns, arguments.pairs, arguments.seconds)

    def speed_up(name: str) -> float:
        naive = times["parallel naive" if name.startswith("parallel") else "naive"]
        return statistics.median(n / x for n, x in zip(naive, times[name], strict=True))

    return {"candidates": candidates, "ms": {name: 1e3 * statistics.median(v) for name, v in times.items()},
            "speed_up": {name: speed_up(name) for name in times if not name.endswith("naive")}}


CROSS_NETWORK = "cross network"


def part(say: Callable[[dict[str, Any]], None], name: str, arguments: argparse.Namespace) -> None:
    """One model of the zoo, or the comparison of cross networks, in a process of its own."""
    models = zoo(small=arguments.quick)
    say(cross_network(models, arguments) if name == CROSS_NETWORK else examine(models[name], arguments, say))


def parts_of(models: dict[str, Callable[[], ZooModel]], names: list[str] | None) -> list[str]:
    wanted = list(chosen(models, names))
    return wanted + ([CROSS_NETWORK] if names is None or any(n.startswith("own") for n in names) else [])


class Printed:
    """Says what is new of a model's result: ``shown(name, result)`` as often as it grows."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        print(HEADER, flush=True)

    def shown(self, name: str, result: dict[str, Any]) -> None:
        rows = result.get("rows", [])
        for row in rows[self.rows.get(name, 0):]:
            print(line(name, row), flush=True)
        self.rows[name] = len(rows)

    def ended(self, name: str, result: dict[str, Any]) -> None:
        self.shown(name, result)
        for key in ("refused", "not_run"):
            if key in result:
                print(f"{name:28} {key.replace('_', ' ')}: {result[key]}", flush=True)
        if result.get("float64_difference") is not None:
            print(f"{'':28} float64: largest difference {result['float64_difference']:.1e}", flush=True)


def work_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What has to be the same for results to stand in one file."""
    return {"torch": torch.__version__, "threads": torch.get_num_threads(),
            "runtime": "compiled" if arguments.compiled else "eager", "sizes": arguments.sizes,
            "ragged": arguments.ragged, "pairs": arguments.pairs, "seconds": arguments.seconds,
            "float64": not arguments.no_float64, "tile": not arguments.no_tile, "quick": arguments.quick}


def reported(results: dict[str, dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    models = {name: result for name, result in results.items() if name != CROSS_NETWORK}
    report = summary(models, stated(arguments))
    if "speed_up" in results.get(CROSS_NETWORK, {}):
        report["cross_network"] = results[CROSS_NETWORK]
    return {**work_of(arguments), "models": models, "summary": report}


def sweep(names: list[str], arguments: argparse.Namespace, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Parts that ``results`` lacks, or that were stopped at a lower limit, each in a process of its own."""
    printed = Printed()
    for name in names:
        before = results.get(name, {})
        if before and before.get("limit", arguments.limit) >= arguments.limit:
            printed.ended(name, before)
            continue
        found: dict[str, Any] = {}

        def seen(result: dict[str, Any], name: str = name, found: dict[str, Any] = found) -> None:
            found.update(result)
            printed.shown(name, found)

        stopped = run_apart(part, (name, arguments), arguments.limit, seen)
        if stopped is not None:
            found |= {"not_run": stopped, "limit": arguments.limit}
        printed.ended(name, found)
        results[name] = found
        write_whole(arguments.json, {**reported(results, arguments), CROSS_NETWORK: results.get(CROSS_NETWORK, {})})
    return reported(results, arguments)


def earlier(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The results that a file has. SystemExit where it is of other work, or would be lost."""
    path = arguments.json
    if not path.exists():
        return {}
    if not arguments.resume:
        raise SystemExit(f"{path} exists; go on with it (--resume), or name another file")
    try:
        document = json.loads(path.read_text())
        results = document["models"] | {CROSS_NETWORK: document[CROSS_NETWORK]}
    except (ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} holds no results of this benchmark ({type(error).__name__}: {error}); "
                         "name another file") from None
    work = json.loads(json.dumps(work_of(arguments)))
    document = {"tile": True, **document}      # it had no name when none was left out
    other = [f"{key} {document.get(key)!r}, now {value!r}" for key, value in work.items() if document.get(key) != value]
    if other:
        raise SystemExit(f"{path} is of other work ({'; '.join(other)}); repeat its arguments, or name another file")
    return {name: result for name, result in results.items() if result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help="names, or how they begin; see python -m benchmarks.zoo")
    parser.add_argument("--sizes", nargs="+", type=int, help="candidates of one request")
    parser.add_argument("--ragged", nargs="*", type=int, default=[512], help="candidates of the ragged case")
    parser.add_argument("--compiled", action="store_true", help="both sides under torch.compile")
    parser.add_argument("--pairs", type=int, default=15, help="interleaved rounds")
    parser.add_argument("--seconds", type=float, default=300, help="for the rounds of one line; fewer rounds if longer")
    parser.add_argument("--no-float64", action="store_true", help="leave out the check in float64")
    parser.add_argument("--no-tile", action="store_true",
                        help="leave out the column of embeddings looked up once, which exports the model once more")
    parser.add_argument("--quick", action="store_true", help="small widths, three rounds: does it run")
    parser.add_argument("--json", nargs="?", type=Path, const=Path("-"), metavar="FILE",
                        help="JSON instead of the table; with FILE the table too, and FILE written after each model")
    parser.add_argument("--resume", action="store_true", help="go on with FILE")
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one model, where FILE is given")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.pairs = min(arguments.pairs, 3)
        arguments.sizes = arguments.sizes or [1, 16]
        arguments.ragged = [16]
    arguments.sizes = arguments.sizes or list(SIZES)
    if min(arguments.sizes + arguments.ragged) < 1 or arguments.pairs < 3 or not arguments.limit > 0:
        parser.error("sizes must be at least 1, --pairs at least 3, --limit more than 0")
    to_file = arguments.json is not None and str(arguments.json) != "-"
    if arguments.resume and not to_file:
        parser.error("--resume goes on with the FILE of --json")
    models = zoo(small=arguments.quick)
    names = parts_of(models, arguments.models)
    if to_file:
        show(sweep(names, arguments, earlier(arguments))["summary"])
        return
    printed = None if arguments.json else Printed()
    results: dict[str, dict[str, Any]] = {}
    for name in names:
        if name == CROSS_NETWORK:
            results[name] = cross_network(models, arguments)
            continue
        say = partial(printed.shown, name) if printed else lambda result: None
        results[name] = examine(models[name], arguments, say)
        if printed:
            printed.ended(name, results[name])
        torch._dynamo.reset()
    document = reported(results, arguments)
    if printed:
        show(document["summary"])
    else:
        print(json.dumps(document))


if __name__ == "__main__":
    main()
