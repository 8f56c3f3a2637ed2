"""Ranking on MovieLens-1M, time split: the HSTU ranker beside DCN V2 with and without history and simple baselines.

    python -m benchmarks.ranking --store ./store [--recipes ml1m_rank ml1m_rank_dcnv2 ...] [--json]

Each recipe is trained on the store as it stands (``semel ingest ml-1m --store ./store``), all are judged on the same
test requests: NE and AUC with 95 % intervals by user, and the paired difference in NE of each to the first recipe.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from semel import recipes
from semel.examples import RequestLoader, open_examples
from semel.features import Feature, FeatureSpec
from semel.history import HistoryStore
from semel.models import load_model
from semel.models.baselines import BiasModel, LikeKNN, Popularity, TrainingEvents
from semel.training import Trainer, with_paths
from semel.training.evaluation import Predictions, binary_figures, compare, predict

RECIPES = ("ml1m_rank", "ml1m_rank_transformer", "ml1m_rank_dcnv2", "ml1m_rank_dcnv2_no_history", "ml1m_rank_dlrm")
TASK = "like"


def trained(names: list[str], store: Path, out: Path) -> dict[str, tuple[Predictions, float]]:
    """Test predictions and seconds of training by recipe."""
    found = {}
    with HistoryStore.open(store) as events, HistoryStore.open(store / "catalogue") as catalogue:
        for name in names:
            recipe = with_paths(recipes.get(name), store, out)
            run = Trainer(recipe).fit()
            artifact = load_model(run.path)
            rows = open_examples(store, recipe.examples.name).rows("test")
            loader = RequestLoader(rows, events, features=artifact.features, catalogue=catalogue, batch_requests=256,
                                   shuffle=False)
            found[name] = predict(artifact.model, loader, artifact.features.tasks), run.summary["seconds"]
    return found


def baselines(store: Path, name: str) -> dict[str, tuple[Predictions, float]]:
    recipe = recipes.get(name)
    spec = FeatureSpec((Feature("item_id"), Feature("rating", "numeric")), tasks=recipe.features.tasks[:1],
                       history_last=recipe.features.history_last)
    examples = open_examples(store, recipe.examples.name)
    known = TrainingEvents.from_rows(examples.rows("train"), TASK)
    found = {}
    with HistoryStore.open(store) as events:
        for label, kind in (("popularity", Popularity), ("user and item mean", BiasModel), ("item-kNN", LikeKNN)):
            started = time.perf_counter()
            options = {} if kind is Popularity else {"history_last": spec.history_last}
            model: Any = kind.fit(known, **options)
            seconds = time.perf_counter() - started
            loader = RequestLoader(examples.rows("test"), events, features=spec, batch_requests=256, shuffle=False)
            found[label] = predict(model, loader, spec.tasks), seconds
    return found


def run(names: list[str], store: Path, out: Path) -> list[dict[str, Any]]:
    models = trained(names, store, out)
    models |= baselines(store, names[0])
    first = models[names[0]][0]
    rows = []
    for name, (predictions, seconds) in models.items():
        keep = predictions.mask[TASK].astype(bool)
        figures = binary_figures(predictions.user[keep], predictions.label[TASK][keep], predictions.output[keep, 0])
        difference = compare(predictions, first, TASK)["ne"]
        rows.append({"model": name, "seconds": seconds, "ne": figures["ne"].to_json(), "auc": figures["auc"].to_json(),
                     "user_auc": figures["user_auc"].to_json(), "ne_minus_first": difference.to_json()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=Path("./store"))
    parser.add_argument("--out", type=Path, default=Path("./runs"))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = run(arguments.recipes, arguments.store, arguments.out)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'model':28} {'train s':>8} {'NE':>24} {'AUC':>24} {'NE - ' + rows[0]['model']:>28}")
    for row in rows:
        cells = [f"{row[name]['value']:.4f} ({row[name]['low']:.4f}-{row[name]['high']:.4f})" for name in ("ne", "auc")]
        gap = row["ne_minus_first"]
        print(f"{row['model']:28} {row['seconds']:8.0f} {cells[0]:>24} {cells[1]:>24} "
              f"{gap['value']:+.4f} ({gap['low']:+.4f}..{gap['high']:+.4f})")


if __name__ == "__main__":
    main()
