"""Batches of histories for next-item training: last events, earlier stretches, the same order for the same seed."""

import numpy as np
import pytest
import torch

from semel.batch import JaggedTable
from semel.training.sequences import SequenceLoader


def histories(lengths):
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    user = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.cat([torch.arange(n) for n in lengths])
    return JaggedTable({"user": user, "place": place}, offsets)


def rows(loader):
    return [tuple(zip(batch["user"][i].tolist(), batch["place"][i].tolist(), strict=True))
            for batch in loader for i in range(len(batch))]


def test_each_user_gives_its_last_events_once_an_epoch():
    loader = SequenceLoader(histories([3, 9, 5, 1]), batch=2, last=5)
    first, second = rows(loader), rows(loader)
    assert set(first) == set(second) and {row[0][0]: [place for _, place in row] for row in first} == {
        0: [0, 1, 2], 1: [4, 5, 6, 7, 8], 2: [0, 1, 2, 3, 4], 3: [0]}


def test_earlier_stretches_are_whole_and_end_anywhere():
    loader = SequenceLoader(histories([30, 4, 5]), batch=3, last=5, earlier=0.5, epochs=10**9)
    starts = []
    for _ in range(300):
        for row in rows(loader):
            places = [place for _, place in row]
            assert places == list(range(places[0], places[0] + len(row)))
            if row[0][0] == 0:
                assert len(row) == 5
                starts.append(places[0])
            else:
                assert places == list(range(4 if row[0][0] == 1 else 5))
    assert set(starts) == set(range(26))
    assert 0.45 < np.mean(np.array(starts) == 25) < 0.6


def test_the_chance_of_an_earlier_stretch_falls_to_zero():
    loader = SequenceLoader(histories([60] * 300), batch=300, last=5, earlier=1.0, epochs=4)
    shares = [np.mean([row[0][1] != 55 for row in rows(loader)]) for _ in range(6)]
    assert shares[0] > 0.95 and 0.6 < shares[1] < 0.85 and 0.4 < shares[2] < 0.6 and shares[4] == shares[5] == 0


@pytest.mark.parametrize("earlier", [0.0, 0.7])
def test_resumed_in_the_middle_it_goes_on_as_it_would_have(earlier):
    def make():
        return SequenceLoader(histories([8] * 7), batch=2, last=3, seed=5, earlier=earlier, epochs=3)

    whole = [*rows(make())]
    loader = make()
    iterator = iter(loader)
    next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert rows(other) == whole[2:]
