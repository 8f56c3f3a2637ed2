"""Item vectors that lie ready are, to the bit, what would be computed for the request: of the rows, of the catalogue
and of the moment that it sees."""

import dataclasses
import time
from datetime import timedelta

import numpy as np
import pyarrow as pa
import pytest
import torch

from semel.batch import Jagged, RequestRows, offsets_of
from semel.examples import ExposureLog, materialize
from semel.history import Pointers
from semel.memory import DeltaPublisher, DeltaSubscriber, ItemMemory
from semel.models import load_model
from semel.models.early_ranker import VECTOR
from semel.serving import Predictor, replay
from semel.serving.folding import Folding, with_vectors
from semel.serving.item_rows import joined
from serving.stand_ins import make_store
from serving.test_item_rows import save_early_ranker
from serving.test_versions import eventually

FUTURE = 10**17


def raw(items, strings):
    """Ids of ``make_store``; beyond 40 numbers as texts, of which two may stand for one stable id."""
    if not strings:
        return np.array(items)
    return np.array([f"iü{item}" if item < 40 else str(item - 40) + ".0" * (item % 2) for item in items], object)


def append(catalogue, items, times, strings):
    names = raw(items, strings)
    catalogue.append(pa.table({
        "item_id": pa.array(names.tolist(), catalogue.schema.user_id), "event_time": pa.array(times, pa.int64()),
        "title": ["x"] * len(items), "genres": ["war|drama" if item % 2 else "comedy" for item in items],
        "year": pa.array([1900 + item for item in items], pa.int32())}))


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_vectors_are_what_would_be_computed(tmp_path, strings, seed):
    from semel.features import stable_id

    random = np.random.default_rng(seed)
    store, catalogue = make_store(tmp_path / "store", strings)
    save_early_ranker(tmp_path / "run", seed)
    artifact, memory = load_model(tmp_path / "run"), ItemMemory(60, 8)
    publisher, reader = DeltaPublisher(memory, tmp_path / "log", snapshot_every=4), DeltaSubscriber(tmp_path / "log")
    folding = Folding(artifact, catalogue)
    reader.on_new = lambda *new: folding.follow(*new, at_once=random.random() < 0.5)
    versions, others = [catalogue.version], 0
    for _ in range(40):
        what = random.integers(0, 6)
        items = random.integers(0, 60, random.integers(1, 12))
        if what == 0:
            memory.write(stable_id(raw(items, strings)), torch.randn(len(items), 8))
            memory.delete(stable_id(raw(random.integers(0, 60, 3), strings)))
            publisher.flush()
            reader.poll()
        elif what == 1:
            now = time.time_ns() // 1000
            append(catalogue, items, random.choice([5, now, FUTURE], len(items)), strings)
            versions.append(catalogue.version)
        elif what == 2 and random.random() < 0.3:
            catalogue.compact(retention=timedelta(microseconds=time.time_ns() // 1000 - 8 if random.random() < 0.5 else
                                                  time.time_ns()))
        else:
            counts = random.integers(0, 20, 2)
            items = raw(np.concatenate([random.permutation(80)[:count] for count in counts]), strings)
            as_of = random.choice([3, 10, time.time_ns() // 1000 + 10**6, 2 * FUTURE], 2)
            version = random.choice([versions[-1], versions[-1], versions[0]], 2)
            others += bool((version != versions[-1]).any())
            users = np.array(["uü1", "uü2"], object) if strings else np.array([1, 2])
            rows = RequestRows(np.array(["a", "b"], object), Pointers(users, as_of, np.full(2, store.version)), version,
                               {}, Jagged(items, offsets_of(counts)), {}, {})
            batch = materialize(rows, store, catalogue, artifact.features)
            bare = materialize(rows, store, catalogue, dataclasses.replace(artifact.features, candidate=()))
            at = reader.memory
            want = with_vectors(joined(batch, artifact, at)[0], artifact)
            for _ in range(2):
                got = folding.folded(bare, items, version, at)
                assert torch.equal(got.candidate[VECTOR], want.candidate[VECTOR])
            torch.testing.assert_close(artifact.model(got), artifact.model(joined(batch, artifact, at)[0]),
                                       rtol=0, atol=1e-4)
    assert others > 0 and reader.position.sequence > 0
    store.close()
    catalogue.close()


def test_a_change_is_computed_once_for_both_tables_and_not_for_a_model_that_nobody_asks(tmp_path, monkeypatch):
    import semel.memory.folded

    for store in make_store(tmp_path / "store"):
        store.close()
    run, memory, computed = tmp_path / "run", ItemMemory(100, 8), []
    save_early_ranker(run)
    memory.write(np.arange(30), torch.randn(30, 8))
    publisher, fold = DeltaPublisher(memory, run / "memory"), semel.memory.folded.fold
    monkeypatch.setattr(semel.memory.folded, "fold", lambda *given: computed.append(len(given[-1])) or fold(*given))

    def publish(predictor, counts):
        for count in counts:
            memory.write(np.arange(count), torch.randn(count, 8))
            publisher.flush()
            eventually(lambda: predictor.memory.position.sequence == publisher.sequence)
            predictor.rank(1, list(range(20)))

    with Predictor.load(run, tmp_path / "store", mode="a") as predictor:
        publish(predictor, [1, 1, 1])  # both tables are there
        computed.clear()
        publish(predictor, [5, 3, 7, 2])
        assert sum(computed) == 5 + 3 + 7 + 2
        save_early_ranker(run, seed=1)
        eventually(lambda: predictor.model_version == load_model(run).version)
        publish(predictor, [1, 1, 1])
        computed.clear()
        publish(predictor, [5, 3, 7, 2])
        assert sum(computed) == 5 + 3 + 7 + 2


def test_a_candidate_that_was_seen_costs_no_read_and_no_computation(tmp_path, monkeypatch):
    store, catalogue = make_store(tmp_path / "store")
    store.close()
    save_early_ranker(tmp_path / "run")
    memory = ItemMemory(100, 8)
    memory.write(np.arange(30), torch.randn(30, 8))
    DeltaPublisher(memory, tmp_path / "run" / "memory")
    catalogue.close()
    with Predictor.load(tmp_path / "run", tmp_path / "store", mode="a") as predictor:
        first = predictor.prerank(1, list(range(60)))

        def fail(*given):
            assert not given[-1].candidate, "features were read"
            return {}

        monkeypatch.setattr("semel.memory.folded.fold", None)
        monkeypatch.setattr("semel.examples.materialization.catalogue_features", fail)
        again = predictor.prerank(1, list(range(60)), as_of=first.pointer.as_of)
        assert again.results == first.results
        monkeypatch.undo()
        append(predictor.catalogue, [3], [time.time_ns() // 1000], False)
        changed = dict(predictor.prerank(1, list(range(60))).results)
        before = dict(predictor.prerank(1, list(range(60)), as_of=first.pointer.as_of).results)
        assert before == dict(first.results)
        assert [item for item in before if before[item] != changed[item]] == [3]


def test_all_of_it_is_replayed_to_the_bit(tmp_path):
    """Rows and features that change, requests of the past, a catalogue that is compacted, new weights."""
    random = np.random.default_rng(0)
    for store in make_store(tmp_path / "store"):
        store.close()
    run, memory = tmp_path / "run", ItemMemory(100, 8)
    save_early_ranker(run)
    publisher, ranked = DeltaPublisher(memory, run / "memory"), 0
    with Predictor.load(run, tmp_path / "store", mode="a") as predictor:
        for step in range(12):
            memory.write(random.integers(0, 60, 10), torch.randn(10, 8))
            publisher.flush()
            eventually(lambda: predictor.memory.position.sequence == publisher.sequence)
            append(predictor.catalogue, random.integers(0, 60, 4), [time.time_ns() // 1000 - step, 7, 9, FUTURE], False)
            if step == 5:
                predictor.catalogue.compact()
            if step == 8:
                save_early_ranker(run, seed=1)
                eventually(lambda: predictor.model_version == load_model(run).version)
            for as_of in (None, 8, 10**15):
                found = predictor.rank(int(random.integers(0, 25)), random.permutation(80)[:30], as_of=as_of)
                assert len(found.results) == 30
                ranked += 1
    paths = ExposureLog(tmp_path / "store" / "exposures").read()["path"].to_pylist()
    assert len(paths) == ranked and all(path.startswith("folded threads=") for path in paths)
    report = replay(run, tmp_path / "store")
    assert report.exact and report.bit_equal == report.requests == ranked and report.max_difference == 0
