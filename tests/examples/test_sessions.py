import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import Label, sessions

S = 1_000_000


def events(rows, **types):
    names = ("user_id", "item_id", "event_time", "rating")
    return pa.table({name: pa.array([row[i] for row in rows], types.get(name)) for i, name in enumerate(names)})


def naive(rows, gap, cut=None):
    """Sessions by a plain loop: [(user, as_of, {item: rating})]."""
    out = []
    for user in sorted({row[0] for row in rows}):
        own = sorted((row for row in rows if row[0] == user), key=lambda row: row[2])
        groups, previous = [], None
        for _, item, time, rating in own:
            if previous is None or time - previous > gap:
                groups.append({})
            groups[-1].setdefault(item, [time, rating])[1] = rating
            previous = time
        for group in groups:
            entries = list(group.items())
            step = cut or len(entries)
            for begin in range(0, len(entries), step):
                part = entries[begin : begin + step]
                out.append((user, part[0][1][0], {item: rating for item, (_, rating) in part}))
    return out


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(0, 40),
                            st.sampled_from([1.0, 3.5, 4.0, 5.0])), max_size=40),
    gap=st.integers(0, 8), cut=st.sampled_from([None, 1, 2, 3]), text=st.booleans(),
)
def test_sessions_equal_a_plain_loop(rows, gap, cut, text):
    if text:
        rows = [(f"ü{user}", f"item {item}", *rest) for user, item, *rest in rows]
    kind = pa.string() if text else pa.int64()
    table = events(rows, user_id=kind, item_id=kind, event_time=pa.int64(), rating=pa.float32())
    result = sessions(table, gap, version=7, catalogue_version=3, max_candidates=cut)
    expected = naive(rows, gap, cut)
    assert list(zip(result.pointers.user_id.tolist(), result.pointers.as_of.tolist(), strict=True)) \
        == [(user, as_of) for user, as_of, _ in expected]
    assert [row.tolist() for row in result.candidates] == [list(items) for *_, items in expected]
    ratings = [rating for *_, items in expected for rating in items.values()]
    assert result.label["rating"].tolist() == ratings
    assert result.label["like"].tolist() == [float(rating >= 4) for rating in ratings]
    assert len(set(result.request_id)) == len(result)
    assert (result.pointers.version == 7).all() and (result.catalogue_version == 3).all()


def test_events_tied_with_the_first_belong_to_the_session_and_not_to_the_history():
    table = events([(1, 10, 0, 5.0), (1, 11, 700 * S, 4.0), (1, 12, 700 * S, 2.0), (1, 13, 1200 * S, 5.0)])
    result = sessions(table)
    assert [row.tolist() for row in result.candidates] == [[10], [11, 12, 13]]
    assert result.pointers.as_of.tolist() == [0, 700 * S]
    assert result.request_id.tolist() == ["1-0", f"1-{700 * S}"]


def test_a_gap_of_exactly_the_limit_does_not_end_a_session():
    assert len(sessions(events([(1, 10, 0, 5.0), (1, 11, 600 * S, 4.0)]))) == 1
    assert len(sessions(events([(1, 10, 0, 5.0), (1, 11, 600 * S + 1, 4.0)]))) == 2


def test_a_cut_between_tied_events_keeps_request_ids_apart():
    result = sessions(events([(1, item, 5, 4.0) for item in range(5)]), max_candidates=2)
    assert result.request_id.tolist() == ["1-5", "1-5-2", "1-5-3"]


def test_null_values_are_no_label_and_events_without_ratings_can_be_labelled():
    table = events([(1, 10, 0, None), (1, 11, 1, 4.0)], rating=pa.float32())
    result = sessions(table, labels=(Label("like", "rating", 4.0), Label("bought")))
    assert result.label_mask["like"].tolist() == [False, True]
    assert result.label["like"].tolist() == [0.0, 1.0]
    assert result.label["bought"].tolist() == [1.0, 1.0] and result.label_mask["bought"].all()


def test_bad_events_are_named():
    good = events([(1, 10, 0, 5.0)])
    with pytest.raises(ValueError, match="no column 'rating'"):
        sessions(good.drop_columns("rating"))
    with pytest.raises(ValueError, match="event_time"):
        sessions(events([(1, 10, 0.5, 5.0)]))
    with pytest.raises(ValueError, match="user_id"):
        sessions(events([(None, 10, 0, 5.0)]))
    with pytest.raises(ValueError, match="gap_us"):
        sessions(good, -1)
    with pytest.raises(ValueError, match="strings"):
        sessions(events([(1, 10, 0, "good")]))


def test_a_million_events_take_seconds():
    rng = np.random.default_rng(0)
    n = 1_000_000
    table = pa.table({"user_id": rng.integers(0, 6000, n), "item_id": rng.integers(0, 3700, n),
                      "event_time": rng.integers(0, 10**9, n) * S, "rating": rng.integers(1, 6, n).astype(np.float32)})
    import time

    start = time.perf_counter()
    result = sessions(table)
    assert len(result.candidates.values) <= n
    assert time.perf_counter() - start < 15  # a few seconds alone; other work may share the machine
