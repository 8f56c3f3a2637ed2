"""Isolated models against the same models without sides: what they cost, and how well they rank.

    python -m benchmarks.isolated --ml-1m FOLDER --movietweetings FOLDER [--seeds 5] [--json FILE]
    python -m benchmarks.isolated --quick             # the simulator only, small, 2 seeds

Four forms of each model: ``plain``, whose every layer mixes request and candidate; ``isolated``, as wide, whose request
rows never see candidates; and two that cost as much as plain with 100 candidates a request: ``widened``, all that
isolation saved being spent on a wider request side, and ``both``, whose candidate side is widened to half the cost
first. Each is trained on the same batches in the same order, with the same learning rate, from --seeds starts; the data
are split by time. FLOPs are of matrix products, per candidate, at N candidates a request. Intervals: of the difference
to the plain form of the same seed, 95 % by Student's t over seeds; and, of the mean over seeds, by resampling users.
AUC above 0 and NE below 0 are better than plain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from semel import metrics
from semel.batch import RequestBatch
from semel.datasets import ingest, layouts
from semel.datasets.simulate import SimulationConfig, simulate
from semel.examples import RequestLoader, build_examples, history_tensors, sequences_before
from semel.features import Feature, FeatureSpec, Task
from semel.history import HistoryStore
from semel.models import ModelConfig, make_model, ranking_loss, widen_candidate, widen_request
from semel.models.reallocation import cost
from semel.training.evaluation import predict
from semel.training.statistics import request_statistics
from semel.training.warm_start import co_occurrence_embeddings

PAIRS = {"dcnv2": "rdcn", "final_mlp": "isolated_final_mlp", "wukong": "isolated_wukong", "dhen": "isolated_dhen"}
"""Each plain kind with its isolated form."""
MANY = 100
"""Candidates a request at which widened models cost as much as plain ones."""
T_QUANTILE = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""Student's t at 97.5 % by number of seeds."""


@dataclass(frozen=True)
class Data:
    """Batches of a data set in memory, and how often training goes through them; ``vectors``: where item tables begin
    (as ``ModelConfig.warm_start`` says)."""

    name: str
    epochs: int
    features: FeatureSpec
    encoders: dict[str, Any]
    vectors: torch.Tensor
    train: list[RequestBatch]
    test: list[RequestBatch]

    @property
    def task(self) -> str:
        return self.features.tasks[0].name


def model_config(kind: str, features: FeatureSpec) -> ModelConfig:
    """Small models of about the same cost."""
    return ModelConfig(kind=kind, dim=8, hidden=(64, 32), dropout=0.1, cross_layers=2, block_fields=8,  # type: ignore[arg-type]
                       fm_rank=8, fm_hidden=(64,), interaction_layers=2)


@contextmanager
def ratings(name: str, folder: Path, features: FeatureSpec, like: float, batch: int, epochs: int) -> Iterator[Data]:
    """``batch``: requests of a step."""
    with tempfile.TemporaryDirectory() as place:
        ingest(layouts.read(folder), Path(place) / "store")
        yield load(name, Path(place) / "store", features, like, batch, epochs)


@contextmanager
def simulated(users: int, batch: int, epochs: int) -> Iterator[Data]:
    """Clicks on what a simulated site showed; what an event was (view or click) is its ``click`` column."""
    features = FeatureSpec(history=(Feature("item_id"), Feature("click"), Feature("topic")),
                           request=(Feature("age"), Feature("country")),
                           candidate=(Feature("topic"), Feature("author_id")), tasks=(Task("click"),), history_last=50)
    data = simulate(SimulationConfig(users=users, shortest=12, longest=2048)).dataset()
    click = pc.equal(data.events["action"], "click").cast(pa.int64())
    data = replace(data, events=data.events.append_column("click", click))
    with tempfile.TemporaryDirectory() as place:
        ingest(data, Path(place) / "store")
        yield load("simulator", Path(place) / "store", features, 1.0, batch, epochs)


def load(name: str, store: Path, features: FeatureSpec, like: float, batch: int, epochs: int) -> Data:
    """Sittings of at most 50 events as requests; the last tenth of events tests, the tenth before it is left out."""
    examples = build_examples(store, "sittings", features, like_threshold=like, max_candidates=50)
    with HistoryStore.open(str(store)) as events, HistoryStore.open(str(store / "catalogue")) as catalogue:
        def batches(split: str) -> list[RequestBatch]:
            return list(RequestLoader(examples.rows(split), events, features=features, catalogue=catalogue,
                                      batch_requests=batch, shuffle="full" if split == "train" else None, workers=0))

        train, test = batches("train"), batches("test")
        before = sequences_before(events, examples.boundaries["validation"], (features.item,))
    encoders = request_statistics(features, train).encoders()
    histories = history_tensors(before.histories, FeatureSpec((Feature(features.item),), item=features.item))
    vocabulary = encoders[features.item]
    vectors = co_occurrence_embeddings(vocabulary(histories.columns[features.item]), histories.offsets,
                                       len(vocabulary), 8, 3)  # type: ignore[arg-type]
    return Data(name, epochs, features, encoders, vectors, train, test)


def configurations(plain_kind: str, features: FeatureSpec) -> dict[str, ModelConfig]:
    plain = model_config(plain_kind, features)
    isolated = replace(plain, kind=PAIRS[plain_kind])  # type: ignore[arg-type]
    history = features.history_last
    half = widen_candidate(isolated, plain, features, share=0.5, candidates=MANY, history=history)
    return {"plain": plain, "isolated": isolated,
            "widened": widen_request(isolated, plain, features, candidates=MANY, history=history),
            "both": widen_request(half, plain, features, candidates=MANY, history=history)}


def trained(config: ModelConfig, data: Data, seed: int) -> tuple[Any, float]:
    """Test predictions and seconds of training. The order of batches is the seed's, the same for all forms."""
    torch.manual_seed(seed)
    model = make_model(config, data.features, data.encoders)
    model.tables.start_items_at(data.vectors)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    total = data.epochs * len(data.train)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / 50) * max(0, 1 - s / total))
    order = np.random.default_rng(seed)
    started = time.perf_counter()
    model.train()
    for _ in range(data.epochs):
        for number in order.permutation(len(data.train)):
            batch = data.train[number]
            loss = ranking_loss(model(batch), batch, data.features.tasks)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            schedule.step()
    return predict(model, data.test, data.features.tasks), time.perf_counter() - started


def judged(predictions: Any, task: str) -> tuple[float, float, np.ndarray]:
    """AUC, NE, and by user: sums of loss, count and label."""
    keep = predictions.mask[task].astype(bool)
    label, logit = predictions.label[task][keep], predictions.output[keep, 0]
    loss = metrics.log_losses_of_logits(label, logit)
    sums = metrics.cluster_sums(predictions.user[keep], loss, np.ones(len(loss)), label)
    return float(metrics.auc(label, logit)), float(ne(sums.sum(0))), sums


def ne(sums: np.ndarray) -> Any:
    return metrics.normalized_entropy(sums[..., 0], sums[..., 1], sums[..., 2])


def over_seeds(values: list[float]) -> dict[str, float]:
    """Mean and its 95 % interval by Student's t."""
    mean = statistics.fmean(values)
    half = T_QUANTILE[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return {"value": mean, "low": mean - half, "high": mean + half}


def compare(kind: str, data: Data, seeds: int) -> list[dict[str, Any]]:
    """One row a form."""
    forms = configurations(kind, data.features)
    found: dict[str, list[tuple[float, float, np.ndarray]]] = {form: [] for form in forms}
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for seed in range(seeds):
        for form, config in forms.items():
            predictions, took = trained(config, data, seed)
            found[form].append(judged(predictions, data.task))
            seconds[form].append(took)
            auc, entropy, _ = found[form][-1]
            print(f"# {data.name} {kind} seed {seed} {form:9} AUC {auc:.4f} NE {entropy:.4f} {took:.1f} s", flush=True)
    rows = []
    for form, config in forms.items():
        spent = cost(config, data.features)
        gaps = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(found[form], found["plain"], strict=True)]
        by_user = [np.mean([sums for _, _, sums in found[f]], axis=0) for f in (form, "plain")]
        rows.append({
            "data": data.name, "model": kind, "form": form, "request_width": config.request_width,
            "candidate_width": config.candidate_width,
            "flops_1": spent.amortized(1), f"flops_{MANY}": spent.amortized(MANY), "request_share": spent.request_share,
            "auc": statistics.fmean(a for a, _, _ in found[form]), "ne": statistics.fmean(b for _, b, _ in found[form]),
            "auc_minus_plain": over_seeds([a for a, _ in gaps]), "ne_minus_plain": over_seeds([b for _, b in gaps]),
            "ne_minus_plain_by_user": metrics.bootstrap_difference(*by_user, ne).to_json(),
            "seconds": statistics.median(seconds[form]),
        })
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    def gap(value: dict[str, float]) -> str:
        return f"{value['value']:+.4f} ({value['low']:+.4f}..{value['high']:+.4f})"

    lines = ["| data | model | form | widths | FLOPs a candidate, N=1 | N=100 | vs plain | AUC "
             "| AUC - plain (seeds) | NE | NE - plain (seeds) | (users) | train s |", "|" + "---|" * 13]
    plain = 1.0
    for row in rows:
        many = row[f"flops_{MANY}"]
        plain = many if row["form"] == "plain" else plain
        own = row["form"] == "plain"
        lines.append("| " + " | ".join([
            row["data"], row["model"], row["form"], f"{row['request_width']:.2f}, {row['candidate_width']:.2f}",
            f"{row['flops_1'] / 1e3:.1f} k",
            f"{many / 1e3:.1f} k", f"{many / plain - 1:+.0%}", f"{row['auc']:.4f}",
            "" if own else gap(row["auc_minus_plain"]), f"{row['ne']:.4f}", "" if own else gap(row["ne_minus_plain"]),
            "" if own else gap(row["ne_minus_plain_by_user"]), f"{row['seconds']:.1f}"]) + " |")
    return "\n".join(lines)


def sources(arguments: argparse.Namespace) -> Iterator[Any]:
    like = (Task("like"),)
    if arguments.quick:
        yield simulated(300, 16, 1)
        return
    if arguments.simulator_users:
        yield simulated(arguments.simulator_users, 32, 2)
    if arguments.movietweetings:
        spec = FeatureSpec(history=(Feature("item_id"), Feature("rating")), candidate=(Feature("genres", "multi"),),
                           tasks=like, history_last=50)
        yield ratings("MovieTweetings", arguments.movietweetings, spec, 8.0, 256, 1)
    if arguments.ml_1m:
        spec = FeatureSpec(history=(Feature("item_id"), Feature("rating")),
                           request=(Feature("age"), Feature("gender"), Feature("occupation")),
                           candidate=(Feature("year", "numeric"), Feature("genres", "multi")), tasks=like,
                           history_last=50)
        yield ratings("MovieLens-1M", arguments.ml_1m, spec, 4.0, 64, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ml-1m", type=Path, help="folder of ratings.dat, movies.dat and users.dat")
    parser.add_argument("--movietweetings", type=Path, help="folder of ratings.dat and movies.dat")
    parser.add_argument("--simulator-users", type=int, default=2000, help="0: without the simulator")
    parser.add_argument("--models", nargs="+", choices=list(PAIRS), default=["dcnv2", "final_mlp", "wukong"])
    parser.add_argument("--seeds", type=int, choices=sorted(T_QUANTILE), default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the rows here, after each model")
    arguments = parser.parse_args()
    seeds = 2 if arguments.quick else arguments.seeds
    rows: list[dict[str, Any]] = []
    for source in sources(arguments):
        started = time.perf_counter()
        with source as data:
            labels = sum(int(batch.label_mask[data.task].sum()) for batch in data.train)
            print(f"# {data.name}: {sum(b.requests for b in data.train)} requests with {labels} labels to train on, "
                  f"{sum(b.candidates for b in data.test)} candidates to test on, read in "
                  f"{time.perf_counter() - started:.0f} s", flush=True)
            for kind in arguments.models:
                rows += compare(kind, data, seeds)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
