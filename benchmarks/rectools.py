"""Next item on a CPU: Semel's recipe beside RecTools' SASRec, same split, same size, equal epochs.

RecTools needs numpy below 2, so it lives in an environment of its own:

    python -m venv rectools-venv
    rectools-venv/bin/pip install "torch==2.13.0" "rectools[torch]==0.19.0"     # a CPU build of torch is enough
    python benchmarks/rectools.py --rectools-python rectools-venv/bin/python

Split: users with at least 3 events, in stable order; the last event tests, the one before it is known when ranking but
not trained on (Semel validates on it), so both sides train on the same events. The catalogue is every item of the
training events, items already met are not removed, a target that training never saw is a miss for both. Both sides:
dimension 64, 2 blocks, 2 heads, the last 100 events, seed 0, the same number of threads and of epochs; RecTools with
its default batch of 128 users and softmax loss, Semel with its recipe's (``movies_next``: 32 users, 512 shared
negatives, items started at what goes together, each next item asked at its own time). They run in turn, ``--rounds``
times; an epoch's seconds are the median distance between the ends of two epochs (no data preparation, no validation,
not the first epoch), on the clock and in CPU time, which a busy machine does not stretch as much. Popularity and item
neighbours are there to be beaten.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from semel.datasets import fetch, ingest
from semel.examples import SequenceSet, history_tensors, leave_one_out
from semel.features import FeatureSpec
from semel.history import HistoryStore
from semel.metrics import ranking_values
from semel.models import load_model
from semel.models.baselines import ItemKNN, Popularity, TrainingEvents
from semel.recipes.movies import movies_next
from semel.training import Progress, Recipe, Trainer
from semel.training.evaluation import rank_next

RECTOOLS = {"batch": 128, "negatives": 128}
"""Users a step and negatives of the other side: RecTools' own batch size. Its ``softmax`` loss ranks all items."""
WORKER = Path(__file__).with_name("_rectools_worker.py")


@dataclass(frozen=True)
class Row:
    """One line of the table. ``times_faster``: RecTools' epoch over this one's, on the clock and in CPU time."""

    data: str
    model: str
    hr10: float
    ndcg10: float
    epoch_seconds: float | None = None
    epoch_cpu_seconds: float | None = None
    times_faster: float | None = None
    times_faster_cpu: float | None = None


class Split:
    """Leave-one-out of one data set."""

    def __init__(self, name: str, store: Path, features: FeatureSpec) -> None:
        self.name, self.path, self.features = name, store, features
        with HistoryStore.open(str(store)) as events:
            self.sequences: SequenceSet = leave_one_out(events, ["item_id"], holdout=2, min_events=3)
        self.train = history_tensors(self.sequences.train(), features)
        before, target = self.sequences.test()
        self.before = history_tensors(before, features)
        self.target = history_tensors(target, features).columns["item_id"].numpy()
        self.users = np.flatnonzero(self.sequences.evaluated)
        self.items = torch.unique(self.train.columns["item_id"]).numpy()

    def ranks(self, model: object) -> np.ndarray:
        some = np.arange(len(self.target))
        return rank_next(model, self.before, self.target, self.items, some, some, last=self.features.history_last)


def rectools(split: Split, python: str, settings: dict) -> tuple[np.ndarray, np.ndarray]:
    """Ranks [U] (10 where the target is not among the first ten); [epochs - 1, 2] wall and CPU seconds of an epoch."""
    before = split.before
    user = np.repeat(split.users, before.lengths.numpy())
    last = np.zeros(len(user), dtype=bool)
    last[before.offsets[1:].numpy() - 1] = True
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/in.npz", user=user, item=before.columns["item_id"].numpy(), train=~last)
        # -I: without this folder on the path, where a module named rectools (this one) would hide the package.
        done = subprocess.run([python, "-I", str(WORKER), f"{folder}/in.npz", f"{folder}/out.npz",
                               json.dumps(settings)], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"RecTools failed under {python}:\n{done.stderr[-2000:]}")
        out = dict(np.load(f"{folder}/out.npz"))
    top = out["top"][np.searchsorted(out["user"], split.users)]
    hit = top == split.target[:, None]
    ranks = np.where(hit.any(axis=1), hit.argmax(axis=1), 10)
    return ranks, np.diff(out["epoch_ends"], axis=0)


def semel(split: Split, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    ends: list[tuple[float, float]] = []

    def on_progress(progress: Progress) -> None:
        if progress.step % (progress.steps // progress.epochs) == 0:
            ends.append((time.perf_counter(), time.process_time()))

    with tempfile.TemporaryDirectory() as folder:
        run = Trainer(replace(recipe, store=str(split.path), out=folder), on_progress).fit()
        ranks = split.ranks(load_model(run.path).model)
    return ranks, np.diff(np.array(ends), axis=0)


def figures(ranks: np.ndarray) -> dict[str, float]:
    values = ranking_values(ranks, ks=(10,))
    return {"hr10": float(values["hr@10"].mean()), "ndcg10": float(values["ndcg@10"].mean())}


def compare(split: Split, python: str | None, epochs: int, rounds: int, threads: int, loss: str) -> list[Row]:
    events = TrainingEvents(
        np.repeat(np.arange(len(split.train)), split.train.lengths.numpy()), split.train.columns["item_id"].numpy(),
        split.train.columns["event_time"].numpy(), np.zeros(len(split.train.columns["item_id"])))
    rows = [Row(split.name, "popularity", **figures(split.ranks(Popularity.fit(events)))),
            Row(split.name, "item neighbours", **figures(split.ranks(ItemKNN.fit(events))))]
    # One validation, at the end: it keeps the last weights, as RecTools does.
    recipe = replace(movies_next(), epochs=epochs, validate_every=epochs, patience=1)
    encoder = replace(recipe.model.encoder, kind="transformer")
    settings = {"epochs": epochs, "seed": recipe.seed, "threads": threads, "dim": recipe.model.dim,
                "blocks": recipe.model.encoder.layers, "heads": recipe.model.encoder.heads,
                "length": recipe.features.history_last, **RECTOOLS,
                "loss": loss}
    sides = {"Semel HSTU": lambda: semel(split, recipe),
             "Semel transformer": lambda: semel(split, replace(recipe, model=replace(recipe.model, encoder=encoder)))}
    if python is not None:
        sides["RecTools SASRec"] = lambda: rectools(split, python, settings)
    results: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in sides}
    for round_ in range(rounds):
        for name, side in sides.items():
            results[name].append(side())
            wall, cpu = np.median(results[name][-1][1], axis=0)
            print(f"{split.name}: round {round_ + 1} of {rounds}, {name}: {wall:.2f} s an epoch, {cpu:.2f} s of CPU",
                  file=sys.stderr, flush=True)
    seconds = {name: np.median(np.concatenate([epochs for _, epochs in found]), axis=0)
               for name, found in results.items()}
    for name, found in results.items():
        faster = seconds["RecTools SASRec"] / seconds[name] if python is not None else (None, None)
        rows.append(Row(split.name, name, **figures(found[0][0]), epoch_seconds=seconds[name][0],
                        epoch_cpu_seconds=seconds[name][1], times_faster=faster[0], times_faster_cpu=faster[1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rectools-python", help="a Python that has RecTools; without it Semel runs alone")
    parser.add_argument("--names", default="ml-latest-small,ml-100k", help="data sets, joined by commas")
    parser.add_argument("--data", type=Path, help="a folder that holds data sets as folders of these names")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rectools-loss", default="softmax", help="or sampled_softmax, BCE, gBCE (RecTools' names)")
    parser.add_argument("--json", type=Path, help="write the results there too")
    options = parser.parse_args()
    if options.epochs < 2:
        parser.error("--epochs must be at least 2: the first one is not timed")
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.names.split(","):
            own = None if options.data is None else options.data / name
            ingest(fetch(name, data=own if own is not None and own.exists() else None), Path(folder) / name)
            split = Split(name, Path(folder) / name, movies_next().features)
            rows += compare(split, options.rectools_python, options.epochs, options.rounds, options.threads,
                            options.rectools_loss)
    print(f"{'data':<17}{'model':<19}{'HR@10':>8}{'NDCG@10':>9}{'s/epoch':>9}{'faster':>8}{'CPU s':>9}{'faster':>8}")
    for row in rows:
        line = f"{row.data:<17}{row.model:<19}{row.hr10:>8.4f}{row.ndcg10:>9.4f}"
        for seconds, faster in ((row.epoch_seconds, row.times_faster), (row.epoch_cpu_seconds, row.times_faster_cpu)):
            line += f"{'' if seconds is None else f'{seconds:.2f}':>9}{'' if faster is None else f'{faster:.1f}x':>8}"
        print(line)
    if options.json is not None:
        options.json.write_text(json.dumps({
            "epochs": options.epochs, "rounds": options.rounds, "threads": options.threads,
            "rectools_loss": options.rectools_loss, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
