"""Evaluation against figures computed plainly, on real ratings and on arrays."""

import json

import numpy as np
import pytest
import torch

from semel import metrics
from semel.batch import JaggedTable
from semel.datasets import fetch, ingest
from semel.examples import build_examples, leave_one_out
from semel.features import Feature, FeatureSpec, Task
from semel.history import HistoryStore, Pointers, Projection
from semel.models import EncoderConfig, ModelConfig, Vocabulary, make_model, save_model
from semel.models.baselines import ItemKNN, Popularity, TrainingEvents
from semel.training import Recipe, evaluate
from semel.training import evaluation as ev
from semel.training.objectives import NextItemObjective, RankingObjective

FEATURES = FeatureSpec(history=(Feature("item_id"), Feature("rating")), candidate=(Feature("genres", "multi"),),
                       tasks=(Task("like"), Task("rating", "regression")), history_last=20)
ENCODER = EncoderConfig(dim=16, layers=1, heads=1, head_dim=16, positions=21)


@pytest.fixture(scope="module")
def store(shared_data, tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluation") / "store"
    ingest(fetch("ml-latest-small", data=shared_data / "ml-latest-small"), path)
    return path


def ranking_recipe(store) -> Recipe:
    return Recipe("tiny", FEATURES, ModelConfig("dcnv2", dim=8, hidden=(8,), cross_layers=1), store=str(store))


@pytest.fixture(scope="module")
def evaluated(store):
    """An untrained ranker, its evaluation, and what it was evaluated on."""
    recipe = ranking_recipe(store)
    objective = RankingObjective(recipe)
    torch.manual_seed(0)
    model = objective.make_model().eval()
    rows = build_examples(store, "sessions", FEATURES).rows("test")
    with HistoryStore.open(str(store)) as events, HistoryStore.open(str(store / "catalogue")) as catalogue:
        evaluation = ev.evaluate_ranking(model, rows, events, catalogue, FEATURES, ranking_requests=3, samples=50)
        yield model, rows, events, catalogue, evaluation
    objective.close()


def test_overall_figures_are_those_of_the_metrics(evaluated):
    model, rows, events, catalogue, evaluation = evaluated
    loader = ev.RequestLoader(rows, events, features=FEATURES, catalogue=catalogue, batch_requests=50, shuffle=False)
    found = ev.predict(model, loader, FEATURES.tasks)
    label, logit = found.label["like"], found.output[:, 0].astype(np.float64)
    like = evaluation.tasks["like"].overall
    assert like.rows == len(label) == len(rows.candidates.values)
    plain = metrics.NormalizedEntropy().update_logits(label, logit)
    assert like.figures["ne"].value == pytest.approx(plain.ne, abs=1e-5)
    assert like.figures["auc"].value == pytest.approx(metrics.auc(label, logit), abs=1e-4)
    assert like.figures["user_auc"].value == pytest.approx(metrics.grouped_auc(found.user, label, logit), abs=1e-4)
    calibration = metrics.Calibration().update_logits(label, logit)
    assert like.figures["calibration"].value == pytest.approx(calibration.ratio, rel=1e-4)
    gap = found.output[:, 1] - found.label["rating"]
    assert evaluation.tasks["rating"].overall.figures["rmse"].value == pytest.approx(np.sqrt((gap**2).mean()), rel=1e-4)
    for interval in like.figures.values():
        assert interval.low < interval.high


def test_slices_partition_the_rows(evaluated):
    rows, evaluation = evaluated[1], evaluated[4]
    for task in evaluation.tasks.values():
        for slices in (task.by_history_length, task.by_item_age):
            assert sum(part.rows for part in slices) == task.overall.rows
            assert len(slices) > 2
    assert evaluation.catalogue is not None and evaluation.catalogue.overall.rows == 3
    assert evaluation.requests == len(rows)


def test_json_has_no_nan_and_says_what_was_done(evaluated, tmp_path):
    evaluation = evaluated[4]
    evaluation.save(tmp_path / "evaluation.json")
    value = json.loads((tmp_path / "evaluation.json").read_text())
    assert value["tasks"]["like"]["ne"]["low"] < value["tasks"]["like"]["ne"]["high"]
    assert "hr@10" in value["catalogue"] and "ties by item order" in value["protocol"]


def test_catalogue_ranks_are_the_places_of_positive_candidates(evaluated):
    model, rows, events, catalogue, _ = evaluated
    some = rows.select(np.flatnonzero([bool(part.any()) for part in np.split(
        rows.label["like"] == 1, rows.candidates.offsets[1:-1])])[:2])
    items = catalogue.keys()[:300]
    ranks, request, target = ev.rank_catalogue(model, some, items, events, catalogue, FEATURES, candidates_at_once=1)
    assert (some.label["like"] == 1).sum() == len(ranks)
    for number in range(2):
        whole = ev._with_candidates(some.select(np.array([number])), ev.Jagged.from_rows([items]))
        scores = model(ev.materialize(whole, events, catalogue, FEATURES))[:, 0].detach().numpy()
        place = np.empty(len(items), int)
        place[np.argsort(-scores, kind="stable")] = np.arange(len(items))
        for rank, item in zip(ranks[request == number], target[request == number], strict=True):
            where = np.flatnonzero(items == item)
            assert abs(rank - (place[where[0]] if len(where) else len(items))) <= 1  # float summation order


def test_item_age_starts_at_the_first_event(evaluated):
    events = evaluated[2]
    known, first = ev.first_events(events)
    users = events.keys()
    table = events.read(Pointers(users, np.array(np.iinfo(np.int64).max), np.array(events.version)),
                        Projection(columns=("event_time", "item_id")))
    for item in known[::1500]:
        time = table.columns["event_time"][table.columns["item_id"] == item].min()
        assert first[np.searchsorted(known, item)] == time
        np.testing.assert_array_equal(
            ev.item_age(np.array([item, item, -5]), np.array([time, time + 7, time]), known, first), [0, 7, -1])


def test_popularity_and_neighbours_under_leave_one_out(store):
    with HistoryStore.open(str(store)) as events:
        sequences = leave_one_out(events, ["item_id"], holdout=2, min_events=3)
    train = sequences.train()
    user = np.repeat(np.arange(len(train)), train.lengths)
    fitted = TrainingEvents(user, train.columns["item_id"], train.columns["event_time"], np.zeros(len(user)))
    _, target = sequences.test()
    popular = ev.evaluate_next_item(Popularity.fit(fitted), sequences, FeatureSpec(), samples=20)
    ids, counts = np.unique(train.columns["item_id"], return_counts=True)
    best = ids[np.argsort(-counts, kind="stable")[:10]]
    assert popular.catalogue is not None
    hits = np.isin(target.columns["item_id"], best).mean()
    assert popular.catalogue.overall.figures["hr@10"].value == pytest.approx(hits)
    near = ev.evaluate_next_item(ItemKNN.fit(fitted), sequences, FeatureSpec(), samples=20)
    assert near.catalogue is not None and near.catalogue.overall.figures["hr@10"].value > 0.08 > 0.03 > hits
    assert popular.tasks == {} and popular.items == len(ids)


def test_a_trained_run_is_evaluated_from_its_folder(store, tmp_path):
    for recipe, objective_of in (
        (ranking_recipe(store), RankingObjective),
        (Recipe("next", FeatureSpec(history_last=20), ModelConfig("next_item", dim=16, encoder=ENCODER),
                store=str(store)), NextItemObjective),
    ):
        objective = objective_of(recipe)
        version = save_model(tmp_path / recipe.name, objective.make_model(), recipe.model, recipe.features, recipe.name)
        objective.close()
        (tmp_path / recipe.name / "recipe.json").write_text(json.dumps(recipe.to_json()))
        steps = []
        evaluation = evaluate(tmp_path / recipe.name, samples=20, split="validation", ranking_requests=2,
                              on_progress=lambda *step, steps=steps: steps.append(step))
        assert evaluation.model_version == version and evaluation.split == "validation"
        assert evaluation.catalogue is not None and steps[-1][1] == steps[-1][2]
    with pytest.raises(ValueError, match="none of test, validation"):
        evaluate(tmp_path / "next", split="train")
    with pytest.raises(FileNotFoundError):
        evaluate(tmp_path / "nowhere")


def test_next_item_ranks_count_ties_by_item_order_and_miss_the_unknown():
    class Constant:
        def score_items(self, batch, item_ids):
            return torch.zeros(batch.requests, len(item_ids))

    history = JaggedTable({"item_id": torch.arange(3), "event_time": torch.arange(3)}, torch.tensor([0, 1, 3]))
    ranks = ev.rank_next(Constant(), history, np.array([30, 77]), np.array([10, 30, 20]), np.arange(2), np.arange(2),
                         last=5, users_at_once=1)
    np.testing.assert_array_equal(ranks, [1, 3])


def test_paired_comparison_sees_a_small_steady_difference():
    rng = np.random.default_rng(0)
    user, item = np.repeat(np.arange(200), 10), np.arange(2000)
    logit = rng.normal(size=2000)
    label = (rng.random(2000) < metrics.sigmoid(logit)) * 1.0
    mask = {"like": np.ones(2000, bool)}
    good, noisy = (ev.Predictions(user, item, item, item, output[:, None], {"like": label}, mask)
                   for output in (logit, logit + 0.6 * rng.normal(size=2000)))
    difference = ev.compare(good, noisy, "like", samples=200)
    assert difference["ne"].high < 0 < difference["user_auc"].value
    alone = ev.binary_figures(user, label, logit, samples=200)["ne"]
    assert difference["ne"].high - difference["ne"].low < alone.high - alone.low
    with pytest.raises(ValueError, match="same candidates"):
        ev.compare(good, ev.Predictions(user, item[::-1], item, item, noisy.output, {"like": label}, mask), "like")


def test_a_model_left_in_training_mode_is_put_back():
    model = make_model(ModelConfig("next_item", dim=16, encoder=ENCODER), FeatureSpec(),
                       {"item_id": Vocabulary(np.arange(4))}).train()
    history = JaggedTable({"item_id": torch.arange(3), "event_time": torch.arange(3)}, torch.tensor([0, 1, 3]))
    ranks = [ev.rank_next(model, history, np.array([1, 2]), np.arange(4), np.arange(2), np.arange(2), last=5)
             for _ in range(2)]
    np.testing.assert_array_equal(*ranks)  # no dropout while ranking
    assert model.training


def test_empty_data_are_one_clear_error(store):
    with HistoryStore.open(str(store)) as events:
        rows = build_examples(store, "sessions", FEATURES).rows("test").select(np.empty(0, int))
        with pytest.raises(ValueError, match="no requests"):
            ev.evaluate_ranking(None, rows, events, None, FEATURES)
        sequences = leave_one_out(events, ["item_id"], holdout=2, min_events=10**6)
        with pytest.raises(ValueError, match="enough events"):
            ev.evaluate_next_item(None, sequences, FeatureSpec())
