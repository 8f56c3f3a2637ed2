"""Recommendation: the stages in a chain over one view; what is filtered never comes back, caps hold, costs are said."""

import numpy as np
import pyarrow as pa
import pytest

from semel.examples import OUTCOME_SCHEMA, ExposureLog, join
from semel.features import Task
from semel.serving import InvalidRequest, Predictor, StageSize, replay
from serving.stand_ins import make_store, save_next_item, save_tiny_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    save_tiny_model(folder / "rank")
    save_tiny_model(folder / "light", seed=1, kind="dcnv2")
    save_next_item(folder / "next")
    return folder


@pytest.fixture
def store(tmp_path):
    for handle in make_store(tmp_path / "store"):
        handle.close()
    return tmp_path / "store"


def ids(result):
    return [item for item, _ in result.results]


def test_the_chain_is_its_stages_one_after_the_other(runs, store):
    with Predictor.load(runs / "rank", store, retrieve=runs / "next", prerank=runs / "light") as predictor:
        for user in (1, 3, 900):
            said = {"context": {"surface": "home", "hour": 9.0}, "as_of": 5 * 10**14}
            result = predictor.recommend(user, 4, **said, retrieve=StageSize(12), prerank=StageSize(7))
            first = predictor.retrieve(user, 12, **said)
            second = predictor.prerank(user, ids(first), limit=7, **said)
            third = predictor.rank(user, ids(second), limit=4, **said)
            assert result.results == third.results and result.pointer == third.pointer
            assert [(stage.stage, stage.model_version, stage.counts, stage.cut) for stage in result.stages] == [
                (name, one.model_version, one.counts, 0)
                for name, one in (("retrieve", first), ("prerank", second), ("rank", third))]
            assert set(result.timings_ms) == {"retrieve", "prerank", "rank", "total"}
            assert sum(result.timings_ms[name] for name in ("retrieve", "prerank", "rank")) \
                <= result.timings_ms["total"] + 0.01
            assert all(stage.timings_ms["total"] == result.timings_ms[stage.stage] for stage in result.stages)
        assert predictor.preranker.model_version == second.model_version != result.model_version


def test_with_one_run_its_model_does_all_of_it(runs, store):
    with Predictor.load(runs / "rank", store, log_exposures=False) as predictor:
        result = predictor.recommend(3, 5, as_of=5 * 10**14)
        everything = predictor.rank(3, list(range(20)), limit=5, as_of=5 * 10**14)
        assert ids(result) == ids(everything)
        assert [stage.stage for stage in result.stages] == ["retrieve", "rank"]
        hits = predictor.states.hits
        predictor.recommend(3, 5, as_of=5 * 10**14)
        assert predictor.states.hits == hits + 2  # the user's side is computed once for both stages, and was kept
        with pytest.raises(InvalidRequest, match="prerank: there is no model") as caught:
            predictor.recommend(3, prerank=StageSize(5))
        assert caught.value.field == "prerank"
        assert len(predictor.prerank(3, list(range(5000)), limit=9).results) == 9


def test_filters_never_leak_and_the_cap_always_holds(runs, store):
    rng = np.random.default_rng(1)
    genre = {item: "drama|war" if item % 2 == 0 else "comedy" for item in range(20)}
    with Predictor.load(runs / "rank", store, retrieve=runs / "next", prerank=runs / "light",
                        log_exposures=False) as predictor:
        for _ in range(12):
            user, most = int(rng.integers(0, 20)), int(rng.integers(1, 4))
            blocked = rng.choice(20, rng.integers(0, 12), replace=False)
            said = {"exclude_seen": True, "blocked": blocked, "diversity": {"column": "genres", "most": most}}
            history = seen(predictor, user)
            candidates = rng.permutation(40)
            for result in (predictor.recommend(user, 10, **said), predictor.retrieve(user, 10, **said),
                           predictor.prerank(user, candidates, **said), predictor.rank(user, candidates, **said)):
                found = ids(result)
                assert not set(found) & (set(blocked.tolist()) | history) and len(set(found)) == len(found)
                known = [genre[item] for item in found if item in genre]
                assert all(known.count(value) <= most for value in set(known))
            # Nothing is left out but what must be: those that the catalogue does not have are never too many.
            allowed = [item for item in candidates.tolist() if item not in history and item not in blocked]
            count = sum(min(most, sum(genre.get(item) == value for item in allowed)) for value in ("drama|war",
                                                                                                    "comedy"))
            assert len(ids(result)) == count + sum(item >= 20 for item in allowed)


def seen(predictor, user):
    from semel.batch import Pointers
    from semel.history import Projection

    history = predictor.store.read(Pointers([user], 2**62, predictor.store.version), Projection(("item_id",)))
    return set(history.columns["item_id"].tolist())


def test_budgets_of_time_cut_the_last_candidates_and_say_so(runs, store):
    with Predictor.load(runs / "rank", store, retrieve=runs / "next", prerank=runs / "light",
                        log_exposures=False) as predictor:
        whole = predictor.recommend(3, 20)
        assert [stage.cut for stage in whole.stages] == [0, 0, 0]
        tight = predictor.recommend(3, 20, prerank=StageSize(None, 1e-3), rank=StageSize(None, 1e-3))
        assert [stage.counts["scored"] for stage in tight.stages] == [20, 1, 1]
        assert [stage.cut for stage in tight.stages] == [0, 19, 0]
        assert ids(tight) == ids(predictor.retrieve(3, 1))
        roomy = predictor.recommend(3, 20, retrieve=StageSize(None, 1e6), prerank=StageSize(None, 1e6),
                                    rank=StageSize(None, 1e6), as_of=whole.pointer.as_of)
        assert roomy.results == whole.results


def test_every_stage_is_an_exposure_that_replays_and_only_the_last_gets_labels(runs, store):
    with Predictor.load(runs / "rank", store, retrieve=runs / "next", prerank=runs / "light") as predictor:
        results = [predictor.recommend(user, 5, context={"surface": "home"}) for user in range(8)]
        alone = predictor.retrieve(3, 6, exclude_seen=True)
        empty = predictor.recommend(3, blocked=list(range(20)))
        assert empty.results == [] and [stage.counts["out"] for stage in empty.stages] == [0, 0, 0]
    for run, requests in (("rank", 9), ("light", 9), ("next", 10)):
        report = replay(runs / run, store)
        assert report.exact and report.requests == report.bit_equal == report.histories_equal == requests
    log = ExposureLog(store / "exposures").read()
    rows = {row["request_id"]: row for row in log.to_pylist()}
    assert len(rows) == 28 == len(log)
    for result in results:
        parts = [rows[f"{result.request_id}/{stage}"] for stage in ("retrieve", "prerank")]
        last = rows[result.request_id]
        assert [row["stage"] for row in (*parts, last)] == ["retrieve", "prerank", "rank"]
        assert [row["part_of"] for row in (*parts, last)] == [result.request_id] * 2 + [None]
        assert {(row["user_id"], row["as_of"], row["version"], row["catalogue_version"])
                for row in (*parts, last)} == {(*result.pointer, 1)}
        for before, after in ((parts[0], parts[1]), (parts[1], last)):
            passed = [item for item, sent in zip(before["candidates"], before["returned"], strict=True) if sent]
            assert sorted(after["candidates"]) == sorted(passed)
    assert rows[alone.request_id]["stage"] == "retrieve" and rows[alone.request_id]["part_of"] is None
    outcomes = pa.Table.from_pylist([
        {"request_id": result.request_id, "item_id": item, "task": "like", "value": 1.0, "received_at": 2**61}
        for result in results for item, _ in result.results[:2]], OUTCOME_SCHEMA)
    joined = join(log, outcomes, 2**61, [Task("like", unobserved=0.0)], 2**62)
    labelled = np.add.reduceat(joined.rows.label_mask["like"], joined.rows.candidates.offsets[:-1].clip(
        max=len(joined.rows.label_mask["like"]) - 1)) * (joined.rows.candidates.lengths > 0)
    assert {one for one, count in zip(joined.rows.request_id, labelled, strict=True) if count} \
        == {result.request_id for result in results if result.results}


@pytest.mark.parametrize(("arguments", "field"), [
    ({"limit": 0}, "limit"), ({"limit": 1 << 17}, "limit"), ({"retrieve": StageSize(0)}, "retrieve.candidates"),
    ({"retrieve": StageSize(True)}, "retrieve.candidates"), ({"retrieve": {"candidates": 5}}, "retrieve"),
    ({"retrieve": StageSize(5, -1)}, "retrieve.budget_ms"), ({"rank": StageSize(5)}, "rank.candidates"),
    ({"rank": StageSize(None, "3")}, "rank.budget_ms"), ({"prerank": StageSize(5)}, "prerank"),
    ({"context": {"hour": "x"}}, "context.hour"), ({"blocked": [None]}, "blocked.0"), ({"user_id": None}, "user_id"),
    ({"as_of": 2**62}, "as_of"), ({"diversity": {"column": "nothing"}}, "diversity.column"),
])
def test_what_is_wrong_is_refused_by_name_and_nothing_is_logged(predictor, arguments, field):
    with pytest.raises(InvalidRequest) as caught:
        predictor.recommend(**{"user_id": 1, **arguments})
    assert caught.value.field == field
    assert predictor.flush(10) and len(predictor._log.read()) == 0


def test_runs_that_do_not_fit_are_refused(runs, store, tmp_path):
    from semel.history import HistoryStore

    with pytest.raises(FileNotFoundError, match="no run at"):
        Predictor.load(runs / "rank", store, retrieve=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="holds no model"):
        Predictor.load(runs / "rank", store, prerank=store)
    HistoryStore.open(store, mode="a").close()  # and the store is closed again


def test_an_item_memory_is_scanned_preranks_and_replays(runs, store, tmp_path):
    """An early ranker whose rows come from a log of deltas does both stages before the last one."""
    import torch

    from semel.memory import DeltaPublisher, ItemMemory
    from serving.test_item_rows import eventually, save_early_ranker

    early = tmp_path / "early"
    save_early_ranker(early)
    memory = ItemMemory(100, 8)
    publisher = DeltaPublisher(memory, early / "memory")
    with Predictor.load(runs / "rank", store, retrieve=early, prerank=early) as predictor:
        before = predictor.retrieve(3, 20)
        memory.write(torch.arange(0, 15), 3 * torch.randn(15, 8))
        publisher.flush()
        for one in (predictor.retrieval, predictor.preranker):
            eventually(lambda one=one: one.memory.position is not None
                       and one.memory.position.sequence == publisher.sequence)
        found = predictor.retrieve(3, 20, as_of=before.pointer.as_of)
        assert found.results != before.results
        ranked = predictor.prerank(3, sorted(ids(found)), as_of=before.pointer.as_of)
        assert ids(found) == ids(ranked)
        assert predictor.retrieve(3, 4, as_of=before.pointer.as_of).results == ranked.results[:4]
        result = predictor.recommend(3, 5, retrieve=StageSize(12), prerank=StageSize(6))
        assert [stage.counts["out"] for stage in result.stages] == [12, 6, 5]
    publisher.close()
    assert replay(early, store).exact and replay(runs / "rank", store).exact
