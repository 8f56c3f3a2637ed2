"""A predictor whose item rows come out of a memory that training writes: fresh, whole, named in exposures, replayed."""

import dataclasses
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
import torch

from semel.examples import ExposureLog
from semel.memory import DeltaPublisher, ItemMemory
from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, load_model, make_model, save_model
from semel.serving import Predictor, replay
from serving.stand_ins import SPEC, make_store, save_tiny_model
from serving.test_versions import eventually

CANDIDATES = list(range(20))
SECOND = 1_000_000


def save_early_ranker(run, seed=0, dim=8):
    from semel.features import stable_id

    torch.manual_seed(seed)
    config = ModelConfig(kind="early_ranker", dim=dim, hidden=(8,), memory_rows=100,
                         encoder=EncoderConfig(dim=16, layers=1, heads=2, head_dim=8, positions=51))
    texts = {"surface": ["home", "search"], "genres": ["drama", "war", "comedy"]}
    encoders = {"item_id": Vocabulary(np.arange(40)), "rating": Scale(3.0, 1.0), "hour": Scale(12.0, 6.0),
                "year": Scale(1990.0, 5.0),
                **{name: Vocabulary(stable_id(np.array(values, dtype=object))) for name, values in texts.items()}}
    model = make_model(config, SPEC, encoders)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return save_model(run, model, config, SPEC, name="tiny")


@pytest.fixture
def site(tmp_path):
    for store in make_store(tmp_path / "store"):
        store.close()
    save_early_ranker(tmp_path / "run")
    return tmp_path / "run", tmp_path / "store"


def exposures(store):
    return ExposureLog(store / "exposures").read().to_pylist()


def scores(predictor, user=3):
    return dict(predictor.rank(user, CANDIDATES, as_of=10**15).results)


def test_rows_are_served_as_they_are_published_and_replayed_as_they_were(site):
    run, store = site
    memory = ItemMemory(100, 8)
    with Predictor.load(run, store) as predictor:
        nothing = scores(predictor)
        assert len(nothing) == 20 and all(map(np.isfinite, nothing.values()))  # all missed, all scored
        publisher = DeltaPublisher(memory, run / "memory")
        seen = [nothing]
        for number in range(4):
            memory.write(np.arange(5 * number, 5 * number + 7), torch.randn(7, 8))
            if number == 3:
                memory.delete([0, 1])
            publisher.flush()
            eventually(lambda: predictor.memory.position is not None
                       and predictor.memory.position.sequence == publisher.sequence)
            seen.append(scores(predictor))
            changed = {item for item in CANDIDATES if seen[-1][item] != seen[-2][item]}
            assert changed == {*range(5 * number, 5 * number + 7), *([0, 1] if number == 3 else [])} & set(CANDIDATES)
        save_early_ranker(run, seed=1)
        assert predictor.versions.poll() or predictor.model_version == load_model(run).version
        scores(predictor)
    named = [row["memory"] for row in exposures(store)]
    assert named == [None, *([{"epoch": 1, "shard": 0, "sequence": n}] for n in (1, 2, 3, 4, 4))]
    report = replay(run, store)
    assert report.exact and report.bit_equal == report.requests == 6 and len(report.by_version) == 2
    assert report.memory_gone == 0 and report.max_difference == 0


def test_a_score_is_the_layers_of_the_row_that_was_read(site):
    run, store = site
    memory = ItemMemory(100, 8)
    memory.write(np.arange(0, 20, 2), torch.randn(10, 8))
    DeltaPublisher(memory, run / "memory")
    model = load_model(run).model
    with Predictor.load(run, store, log_exposures=False) as predictor:
        got = scores(predictor)
        from semel.serving.predictor import _Checked

        one = _Checked(0, "x", 3, np.array(CANDIDATES), {}, None, 10**15, predictor._versions())
        batch = predictor._materialize([one], predictor.artifact)[0]
    _, always_on = model.item_fields(batch.candidate)
    row, hit, _ = memory.read(CANDIDATES)
    item = model.item.fused(row, model.item.always_on(always_on), hit)
    vector, bias = model.request(batch.request)
    want = torch.sigmoid((vector[0, 0] * item).sum(-1) + bias[0, 0])
    assert [got[item] for item in CANDIDATES] == pytest.approx(want.tolist(), abs=1e-6)


def test_a_request_sees_one_state_whole_while_rows_stream_in(site):
    """All rows of a state hold one number: a request that saw two would rank items apart that are alike."""
    run, store = site
    memory, done, failed, seen = ItemMemory(100, 8), threading.Event(), [], set()
    publisher = DeltaPublisher(memory, run / "memory")
    items = list(range(1000, 1040))  # not in the catalogue, one bucket's worth of difference apart
    with Predictor.load(run, store, log_exposures=False) as predictor:
        model = predictor.artifact.model
        with torch.no_grad():
            model.hashed.table.weight.zero_()  # now only rows tell them apart
            model.tables.tables["item_id"].weight.zero_()

        def ask():
            while not done.is_set():
                found = [score for _, score in predictor.rank(1, items, as_of=10**15).results]
                seen.add(round(found[0], 5))
                if max(found) - min(found) > 1e-6:
                    failed.append(found)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(40):
            memory.write(items, torch.full((40, 8), 0.1 * number - 2))
            publisher.flush()
            predictor.memory.poll()
        done.set()
        for thread in threads:
            thread.join(30)
        assert predictor.memory.position.sequence == 40
    assert not failed and len(seen) > 3  # and a state does make a difference


def test_exposures_beyond_the_log_are_counted_and_the_rest_is_exact(site):
    run, store = site
    memory = ItemMemory(100, 8)
    publisher = DeltaPublisher(memory, run / "memory", snapshot_every=2, keep=1)
    with Predictor.load(run, store) as predictor:
        for number in range(6):
            memory.write([number], torch.randn(1, 8))
            publisher.flush()
            predictor.memory.poll()
            scores(predictor)
    report = replay(run, store)
    assert report.exact and report.memory_gone == 5 and report.requests == 1
    for path in (run / "memory").rglob("snapshot-*"):
        path.unlink()
    with pytest.raises(ValueError, match="no longer reaches back to any of the 6 exposures"):
        replay(run, store)


def test_a_memory_that_does_not_fit_is_refused_and_a_dead_log_keeps_serving(site, tmp_path):
    run, store = site
    DeltaPublisher(ItemMemory(10, 5), tmp_path / "narrow")
    with pytest.raises(ValueError, match="has rows of 5 numbers, model tiny-"):
        Predictor.load(run, store, memory=tmp_path / "narrow")
    memory = ItemMemory(100, 8)
    memory.write(CANDIDATES, torch.randn(20, 8))
    publisher = DeltaPublisher(memory, run / "memory")
    with Predictor.load(run, store, log_exposures=False) as predictor:
        before = scores(predictor)
        memory.write(CANDIDATES, torch.randn(20, 8))
        publisher.flush()
        (record,) = (run / "memory").rglob("delta-*")
        whole = record.read_bytes()
        record.write_bytes(whole[:50])
        eventually(lambda: predictor.memory.error is not None or predictor.memory.position.sequence == 1)
        if predictor.memory.error is not None:
            assert scores(predictor) == before
            record.write_bytes(whole)
        eventually(lambda: predictor.memory.position.sequence == 1)
        assert scores(predictor) != before
        with pytest.raises(ValueError, match="rows of 8 numbers"):
            save_early_ranker(tmp_path / "wide", dim=16)
            predictor.swap(load_model(tmp_path / "wide"))
        save_tiny_model(tmp_path / "other")
    with Predictor.load(tmp_path / "other", store, log_exposures=False) as predictor, \
            pytest.raises(ValueError, match="reads an item memory"):
        predictor.swap(load_model(run))


def test_written_rows_are_visible_within_the_interval(site):
    run, store = site
    memory = ItemMemory(100, 8)
    with DeltaPublisher(memory, run / "memory", interval=0.3).start(), \
            Predictor.load(run, store, log_exposures=False) as predictor:
        for _ in range(20):
            memory.write(CANDIDATES, torch.randn(20, 8))
            time.sleep(0.1)
        eventually(lambda: len(predictor.memory.freshness) >= 100)
        assert np.median(predictor.memory.freshness) < 2  # of 0.3 and 0.25, on a machine that may be busy


def test_schema_keeps_the_position_of_each_shard(site):
    from semel.examples.exposures import EXPOSURE_SCHEMA
    from semel.memory import Position
    from semel.serving.exposures import Exposure, Membership, exposures_table

    one = Exposure("r", 1, 2, 3, 0, {}, np.array([1]), np.array([0.5], np.float32), np.array([[0.5]], np.float32),
                   np.array([0]), 1, "v", 4, 0, 0, "eager", "cpu", 5, Membership("b", 0, 1, 1), Position(2, 7, 2))
    table = exposures_table([one, dataclasses.replace(one, memory=None)], EXPOSURE_SCHEMA)
    assert table["memory"].to_pylist() == [
        [{"epoch": 2, "shard": 0, "sequence": 7}, {"epoch": 2, "shard": 1, "sequence": 7}], None]
    assert isinstance(table, pa.Table)


def test_a_memory_that_nobody_would_read_is_refused_whatever_its_url(site, tmp_path):
    _, store = site
    save_tiny_model(tmp_path / "tiny")
    DeltaPublisher(ItemMemory(10, 8), tmp_path / "log")
    for url in (tmp_path / "log", "kafka://x/y", tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=f"memory {url}: model tiny-.* of .*tiny has no item memory.*leave it out"):
            Predictor.load(tmp_path / "tiny", store, memory=url)
    with Predictor.load(tmp_path / "tiny", store, log_exposures=False) as predictor:
        assert predictor.memory is None


def test_a_memory_where_there_can_be_none_is_refused_and_an_empty_one_is_waited_for(site, tmp_path):
    run, store = site
    with pytest.raises(FileNotFoundError, match="nowhere: there is no such folder; name what training publishes to"):
        Predictor.load(run, store, memory=tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"store: .* lies there, which is of no log of deltas"):
        Predictor.load(run, store, memory=store)
    with pytest.raises(ValueError, match="unknown scheme 'kafka'"):
        Predictor.load(run, store, memory="kafka://x/y")
    (tmp_path / "log").mkdir()
    with Predictor.load(run, store, memory=tmp_path / "log", log_exposures=False) as predictor:
        memory = ItemMemory(100, 8)
        memory.write(CANDIDATES, torch.randn(20, 8))
        DeltaPublisher(memory, tmp_path / "log")
        eventually(lambda: predictor.memory.memory is not None and len(predictor.memory.memory) == 20)
