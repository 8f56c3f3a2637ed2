"""What training predicted before it learned: kept whole, found by request, with checksums of features alone."""

import numpy as np
import pytest
import torch

from semel.batch import Jagged, JaggedTable, RequestBatch
from semel.examples.predictions import PredictionLog, features_checksums, read_predictions


def batch_of(requests, candidates=3, seed=0):
    random = np.random.default_rng(seed)
    count = requests * candidates
    many = torch.from_numpy(random.integers(0, 3, count))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), many.cumsum(0)])
    ends = torch.arange(0, count + 1, candidates)
    history = JaggedTable({"event_time": torch.arange(requests)}, torch.arange(requests + 1))
    return RequestBatch(
        np.array([f"r{seed}-{row}" for row in range(requests)], object),
        {"user_id": torch.arange(requests), "as_of": torch.full((requests,), 9), "history": history,
         "history_checksum": torch.from_numpy(random.integers(-9, 9, requests))},
        {"item_id": torch.from_numpy(random.integers(0, 50, count)),
         "genres": Jagged(torch.from_numpy(random.integers(0, 9, int(offsets[-1]))), offsets),
         "year": torch.from_numpy(random.random(count).astype(np.float32))}, ends)


def test_a_checksum_is_of_the_features_of_its_request_wherever_it_lies():
    batch = batch_of(5)
    whole = features_checksums(batch)
    assert len(set(whole.tolist())) == 5
    assert np.array_equal(features_checksums(batch.slice(2, 4)), whole[2:4])
    for change in ("year", "item_id"):
        other = batch_of(5)
        other.candidate[change][7] += 1
        assert (features_checksums(other) != whole).tolist() == [False, False, True, False, False]
    other = batch_of(5)
    other.candidate["genres"].values[-1] += 1
    assert (features_checksums(other) != whole).sum() == 1
    other = batch_of(5)
    other.request["history_checksum"] += 1  # the history has a checksum of its own
    other.candidate["memory_row"] = torch.zeros(15, 2)
    assert np.array_equal(features_checksums(other), whole)


def test_predictions_are_found_by_request_and_steps_that_are_taken_again_are_forgotten(tmp_path):
    log = PredictionLog(tmp_path / "predictions")
    with pytest.raises(FileNotFoundError, match="only a run that follows"):
        read_predictions(tmp_path / "predictions")
    for step, seed in ((1, 0), (2, 1), (3, 2)):
        batch = batch_of(2, seed=seed)
        log.add(step, batch, torch.arange(12.0).reshape(6, 2) + step)
        log.save(step)
    log.save(4)  # nothing more
    assert len(list((tmp_path / "predictions").iterdir())) == 3
    log.forget_after(2)
    again = batch_of(2, seed=0)  # learned from twice: the first time was before it was known
    log.add(3, again, torch.zeros(6, 2))
    log.save(3)
    found = read_predictions(tmp_path / "predictions")
    assert found["request_id"].to_pylist() == ["r0-0", "r0-1", "r1-0", "r1-1"]
    assert found["logits"][1].as_py() == [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]
    assert read_predictions(tmp_path / "predictions", ["r1-0"])["step"].to_pylist() == [2]
