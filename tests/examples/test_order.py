from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples.order import window_order


def order(user, shard, as_of, window, together, seed=0):
    return window_order(np.asarray(user), np.asarray(shard), np.asarray(as_of), window, together,
                        np.random.default_rng(seed))


requests = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(rows=requests, window=st.integers(1, 70), together=st.integers(1, 9), seed=st.integers(0, 5))
def test_each_row_once_windows_whole_shards_whole_and_runs_in_order_of_time(rows, window, together, seed):
    user = np.array([row[0] for row in rows], np.int64)
    as_of = np.array([row[1] for row in rows], np.int64)
    shard = user % 3
    found = order(user, shard, as_of, window, together, seed)
    assert sorted(found.tolist()) == list(range(len(rows)))
    assert found.tolist() == order(user, shard, as_of, window, together, seed).tolist()
    in_window = [window_of for window_of, _ in groupby((found // window).tolist())]
    assert len(in_window) == len(set(in_window))
    visits = [visit for visit, _ in groupby(zip((found // window).tolist(), shard[found].tolist(), strict=True))]
    assert len(visits) == len(set(visits))
    # Each user's requests of a window, cut into runs of `together` in order of time, are found side by side.
    for first in range(0, len(rows), window):
        for who in set(user[first : first + window].tolist()):
            mine = [i for i in range(first, min(first + window, len(rows))) if user[i] == who]
            mine.sort(key=lambda i: (as_of[i], i))
            for at in range(0, len(mine), together):
                run = mine[at : at + together]
                place = found.tolist().index(run[0])
                assert found[place : place + len(run)].tolist() == run


def test_no_user_is_more_of_a_batch_than_its_runs():
    user = np.repeat(np.arange(40), 50)
    found = order(user, user * 0, np.tile(np.arange(50), 40), 2000, 8)
    for at in range(0, 2000, 64):
        assert np.bincount(user[found[at : at + 64]]).max() <= 32
    assert len(np.unique(user[found[:64]])) >= 5


@pytest.mark.parametrize("window", [50, 2000])
def test_epochs_differ(window):
    user = np.repeat(np.arange(40), 50)
    one, two = (order(user, user % 4, user, window, 8, seed) for seed in (0, 1))
    assert (one != two).mean() > 0.5
