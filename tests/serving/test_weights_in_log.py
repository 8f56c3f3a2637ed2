"""A server that sees nothing of its trainer but the log of deltas: rows and weights come out of it, and replay finds
what was served."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from semel.memory import DeltaPublisher, ItemMemory
from semel.models import current_version, exported, install, load_model, model_versions
from semel.serving import Predictor, replay
from serving.stand_ins import make_store
from serving.test_item_rows import CANDIDATES, save_early_ranker, scores
from serving.test_versions import eventually


@pytest.fixture
def site(tmp_path):
    for store in make_store(tmp_path / "store"):
        store.close()
    save_early_ranker(tmp_path / "trainer")
    return tmp_path / "trainer", tmp_path / "log", tmp_path / "local", tmp_path / "store"


def publish(publisher, run):
    publisher.publish_model(*exported(run, current_version(run)))


def test_rows_and_weights_come_through_one_log(site):
    trainer, log, local, store = site
    memory = ItemMemory(100, 8)
    with pytest.raises(FileNotFoundError, match="no run at"):
        Predictor.load(local, store, memory=log)  # nothing was published yet
    publisher = DeltaPublisher(memory, log)
    publish(publisher, trainer)
    with Predictor.load(local, store, memory=log) as predictor:
        assert predictor.model_version == current_version(trainer)
        seen = [scores(predictor)]
        for seed in (1, 2):
            memory.write(np.arange(10), torch.randn(10, 8))
            version = save_early_ranker(trainer, seed=seed)
            publish(publisher, trainer)
            eventually(lambda version=version: predictor.model_version == version)
            assert predictor.memory.position.sequence >= seed + 1  # not before the rows that go with it
            eventually(lambda: predictor.memory.position.sequence == publisher.sequence)
            seen.append(scores(predictor))
    assert all(a[item] != b[item] for a, b in pairwise(seen) for item in CANDIDATES)
    assert [one.version for one in model_versions(local)] == [one.version for one in model_versions(trainer)]
    report = replay(local, store, memory=log)
    assert report.exact and report.bit_equal == report.requests == 3 and len(report.by_version) == 3


def test_a_damaged_version_is_left_and_the_next_one_taken(site):
    trainer, log, local, store = site
    publisher = DeltaPublisher(ItemMemory(100, 8), log)
    publish(publisher, trainer)
    with Predictor.load(local, store, memory=log, log_exposures=False) as predictor:
        first = predictor.model_version
        publisher.publish_model(b'{"version": "x", "weights": "../up.safetensors"}', b"")
        eventually(lambda: predictor.versions.error is not None)
        assert "model-DIGEST" in str(predictor.versions.error) and predictor.model_version == first
        second = save_early_ranker(trainer, seed=1)
        publish(publisher, trainer)
        eventually(lambda: predictor.model_version == second)
        eventually(lambda: predictor.versions.error is None)


def test_a_version_is_installed_once_and_no_older_one_comes_back(site, tmp_path):
    trainer, *_ = site
    first = exported(trainer, current_version(trainer))
    second = exported(trainer, save_early_ranker(trainer, seed=1))
    for content in (first, second, first):
        install(tmp_path / "new", *content)
    assert current_version(tmp_path / "new") == current_version(trainer)
    load_model(tmp_path / "new")
    for content in (b"{", b"[]", b'{"version": "a"}'):
        with pytest.raises(ValueError, match="no description"):
            install(tmp_path / "new", content, b"")
