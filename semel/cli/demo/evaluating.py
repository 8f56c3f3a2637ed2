"""Step 5: both models beside what they must beat, on the same data, with intervals by user."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from semel.cli import output
from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    from semel.cli.output import Steps
    from semel.training import Evaluation

OURS = {"rank": "HSTU ranker", "next": "HSTU next item"}
SAMPLES = 300
"""Bootstrap replicates: enough for the two digits that a table shows."""


def step(demo: Demo) -> None:
    with output.progress_bar() as bar:
        progress = output.Steps(bar)
        ranking = {name: judged.to_json() for name, judged in _ranking(demo, progress).items()}
        next_item = {name: judged.to_json() for name, judged in _next_item(demo, progress).items()}
    demo.facts["ranking"], demo.facts["next_item"] = ranking, next_item
    demo.facts["quality"] = {
        "ranking": {"protocol": next(iter(ranking.values()))["protocol"], "task": "like",
                    "models": {name: _figures(judged["tasks"]["like"], ("ne", "auc", "user_auc", "calibration"))
                               for name, judged in ranking.items()}},
        "next_item": {"protocol": next(iter(next_item.values()))["protocol"],
                      "models": {name: _figures(judged["catalogue"], ("hr@10", "ndcg@10", "mrr"))
                                 for name, judged in next_item.items()}},
    }
    for kind, figure in (("ranking", "ne"), ("next_item", "ndcg@10")):
        values = {name: model[figure]["value"] for name, model in demo.facts["quality"][kind]["models"].items()}
        demo.say(f"{figure.upper()}: " + ", ".join(f"{name} {value:.4f}" for name, value in values.items()))


def _ranking(demo: Demo, progress: Steps) -> dict[str, Evaluation]:
    """On all labelled candidates of the test period."""
    from semel.examples import open_examples
    from semel.features import Feature, FeatureSpec
    from semel.history import HistoryStore
    from semel.models.baselines import BiasModel, LikeKNN, Popularity, TrainingEvents
    from semel.training import evaluate
    from semel.training.evaluation import evaluate_ranking

    recipe = demo.recipe("rank")
    examples = open_examples(demo.store, recipe.examples.name)
    known = TrainingEvents.from_rows(examples.rows("train"), "like")
    length = recipe.features.history_last
    spec = FeatureSpec(history=(Feature("item_id"), Feature("rating", "numeric")), tasks=recipe.features.tasks[:1],
                       history_last=length)
    baselines = {
        "popularity": Popularity.fit(known),
        "user and item mean": BiasModel.fit(known, history_last=length),
        "item-kNN": LikeKNN.fit(known, history_last=length),
    }
    rows = examples.rows("test")
    options: dict[str, Any] = {"ranking_requests": 0, "samples": SAMPLES, "on_progress": progress}
    with HistoryStore.open(demo.store) as store:
        judged = {name: evaluate_ranking(model, rows, store, None, spec, **options)
                  for name, model in baselines.items()}
    ours = evaluate(demo.run["rank"], **options)
    ours.save(demo.run["rank"] / "evaluation.json")
    return {**judged, OURS["rank"]: ours}


def _next_item(demo: Demo, progress: Steps) -> dict[str, Evaluation]:
    """Leave-one-out, among all items."""
    import numpy as np

    from semel.examples import leave_one_out
    from semel.features import stable_id
    from semel.history import HistoryStore
    from semel.models.baselines import ItemKNN, Popularity, TrainingEvents
    from semel.training import evaluate
    from semel.training.evaluation import evaluate_next_item

    recipe = demo.recipe("next")
    features = recipe.features
    with HistoryStore.open(demo.store) as store:
        columns = [feature.name for feature in features.history]
        sequences = leave_one_out(store, columns, holdout=2, min_events=recipe.examples.min_events)
    past = sequences.train()
    users = np.repeat(stable_id(sequences.user_id), past.lengths)
    items = past.strings(features.item) if features.item in (past.dictionaries or {}) else past.columns[features.item]
    # Whether an item was liked plays no part here: to be met is the label.
    known = TrainingEvents(users, stable_id(items), past.columns["event_time"], np.ones(len(users)))
    options: dict[str, Any] = {"samples": SAMPLES, "on_progress": progress}
    judged = {name: evaluate_next_item(model, sequences, features, **options)
              for name, model in {"popularity": Popularity.fit(known), "item-kNN": ItemKNN.fit(known)}.items()}
    ours = evaluate(demo.run["next"], **options)
    ours.save(demo.run["next"] / "evaluation.json")
    return {**judged, OURS["next"]: ours}


def _figures(judgement: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    keys = ("value", "low", "high")
    return {name: {key: judgement[name][key] for key in keys} for name in names if name in judgement}
