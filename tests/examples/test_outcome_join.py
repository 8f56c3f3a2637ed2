from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.examples import exposure_rows, exposure_schema, join, outcome_schema
from semel.features import Feature, Task

TASKS = (Task("click", unobserved=0.0), Task("rating", "regression"))
WINDOW = 100


def exposures(rows, item=None):
    """rows: (request_id, served_at, candidates, shown | None[, context])."""
    item = item or pa.int64()
    schema = exposure_schema(pa.int64(), item)
    count = len(rows)
    fill = {"user_id": [1] * count, "as_of": [row[1] for row in rows], "version": [3] * count,
            "catalogue_version": [2] * count, "request_id": [row[0] for row in rows],
            "served_at": [row[1] for row in rows],
            "candidates": [row[2] for row in rows], "shown": [row[3] for row in rows],
            "context": [row[4] if len(row) > 4 else "{}" for row in rows]}
    for name in ("scored", "returned"):
        fill[name] = [[True] * len(row[2]) for row in rows]
    fill["scores"] = [[0.0] * len(row[2]) for row in rows]
    for name in ("model_version", "device", "path"):
        fill[name] = ["x"] * count
    for name in ("history_checksum", "history_length", "history_status", "batch_requests", "batch_candidates"):
        fill[name] = [0] * count
    return pa.table({f.name: pa.array(fill.get(f.name, [None] * count), f.type) for f in schema}, schema=schema)


def outcomes(rows, item=None):
    schema = outcome_schema(item_id=item or pa.int64())
    names = ("request_id", "item_id", "task", "value", "received_at")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)} | {"outcome_key": [None] * len(rows)}
    return pa.table({f.name: pa.array(columns[f.name], f.type) for f in schema}, schema=schema)


def labels(report, task):
    pairs = zip(report.rows.label[task], report.rows.label_mask[task], strict=True)
    flat = [float(value) if known else None for value, known in pairs]
    return [flat[a:b] for a, b in pairwise(report.rows.candidates.offsets)]


def test_shown_without_outcome_is_a_negative_and_unshown_is_no_label():
    shown = exposures([("r", 0, [1, 2, 3, 4], [True, True, False, None])])
    report = join(shown, outcomes([("r", 1, "click", 1.0, 5), ("r", 1, "rating", 4.0, 6)]), WINDOW, TASKS, now=1000)
    assert labels(report, "click") == [[1.0, 0.0, None, None]]
    assert labels(report, "rating") == [[4.0, None, None, None]]
    assert report.used == 2 and report.watermark == 900


def test_an_outcome_shows_what_no_one_reported_and_a_report_of_shown_counts():
    silent = exposures([("r", 0, [1, 2, 3], None)])
    report = join(silent, outcomes([("r", 1, "rating", 2.0, 5), ("r", 2, "shown", 1.0, 5), ("r", 3, "shown", 0.0, 5),
                                    ("r", 3, "click", 1.0, 6)]), WINDOW, TASKS, now=1000)
    assert labels(report, "click") == [[0.0, 0.0, None]]
    assert labels(report, "rating") == [[2.0, None, None]]
    assert (report.used, report.unshown) == (3, 1)


def test_open_windows_are_held_back_and_late_outcomes_counted():
    log = exposures([("r1", 0, [1], [True]), ("r2", 950, [1], [True])])
    found = outcomes([("r1", 1, "click", 1.0, 101), ("r2", 1, "click", 1.0, 960), ("r3", 1, "click", 1.0, 5),
                      ("r1", 9, "click", 1.0, 5), ("r1", 1, "buy", 1.0, 5)])
    report = join(log, found, WINDOW, TASKS, now=1000)
    assert report.rows.request_id.tolist() == ["r1"] and labels(report, "click") == [[0.0]]
    assert (report.held_back, report.late, report.pending, report.unmatched_requests, report.unmatched_items,
            report.other_tasks) == (1, 1, 1, 1, 1, 1)
    later = join(log, found, WINDOW, TASKS, now=1050)
    assert labels(later, "click") == [[0.0], [1.0]] and later.held_back == 0


def test_the_outcome_received_last_wins_whatever_the_order_of_the_log():
    log = exposures([("r", 0, [1], [True])])
    found = [("r", 1, "click", 0.0, 9), ("r", 1, "click", 1.0, 20), ("r", 1, "click", 0.25, 20)]
    assert labels(join(log, outcomes(found), WINDOW, TASKS, 1000), "click") == [[0.25]]
    # Of equal times, the one logged last.
    assert labels(join(log, outcomes(found[::-1]), WINDOW, TASKS, 1000), "click") == [[1.0]]
    assert join(log, outcomes(found), WINDOW, TASKS, 1000).duplicates == 2


def test_string_items_a_candidate_twice_and_no_candidates():
    log = exposures([("r", 0, ["ä", "b", "ä"], [True, True, True]), ("empty", 0, [], [])], pa.string())
    report = join(log, outcomes([("r", "ä", "click", 1.0, 5)], pa.string()), WINDOW, TASKS, 1000)
    assert labels(report, "click") == [[1.0, 0.0, 1.0], []]
    with pytest.raises(ValueError, match="item_id of outcomes is int64"):
        join(log, outcomes([("r", 1, "click", 1.0, 5)]), WINDOW, TASKS, 1000)


def test_no_task_may_take_the_name_of_the_report_of_what_was_shown():
    with pytest.raises(ValueError, match="'shown'"):
        join(exposures([]), outcomes([]), WINDOW, (Task("shown"),), 1000)
    with pytest.raises(ValueError, match="window_us"):
        join(exposures([]), outcomes([]), -1, TASKS, 1000)


def test_empty_logs_join_to_nothing():
    report = join(exposures([]), outcomes([]), WINDOW, TASKS, 1000)
    assert len(report.rows) == 0 and report.used == 0
    assert join(exposures([]), outcomes([("r", 1, "click", 1.0, 5)]), WINDOW, TASKS, 1000).unmatched_requests == 1
    assert len(join(exposures([("r", 0, [1], None)]), outcomes([]), WINDOW, TASKS, 1000).rows) == 1


def test_the_context_becomes_request_features():
    features = (Feature("age"), Feature("hour", "numeric"), Feature("tags", "multi"))
    log = exposures([("r1", 0, [1], None, '{"age": "25", "hour": 3, "tags": ["a", "b"]}'),
                     ("r2", 0, [1], None, '{"x": 1}')])
    context = join(log, outcomes([]), WINDOW, TASKS, 1000, features).rows.context
    assert context["age"].tolist() == ["25", None] and context["tags"].tolist() == ["a|b", None]
    assert context["hour"].tolist()[0] == 3.0 and np.isnan(context["hour"][1])
    with pytest.raises(ValueError, match=r"context\.hour"):
        exposure_rows(exposures([("r1", 0, [1], None, '{"hour": "late"}')]), features)
    with pytest.raises(ValueError, match="not JSON"):
        exposure_rows(exposures([("r1", 0, [1], None, "{")]), features)


drawn = st.tuples(
    st.sampled_from(["a", "b", "c", "?"]), st.integers(0, 3), st.sampled_from(["click", "rating", "shown", "buy"]),
    st.sampled_from([0.0, 1.0, 3.0]), st.integers(0, 400),
)


@settings(max_examples=150, deadline=None)
@given(found=st.lists(drawn, max_size=14), served=st.lists(st.integers(0, 200), min_size=3, max_size=3),
       shown=st.lists(st.sampled_from([None, True, False]), min_size=3, max_size=3), now=st.integers(100, 400),
       wait=st.integers(0, 300))
def test_joining_again_or_later_or_with_repeats_gives_the_same_labels(found, served, shown, now, wait):
    log = exposures([(name, time, [0, 1, 2], shown) for name, time in zip("abc", served, strict=True)])
    report = join(log, outcomes(found), WINDOW, TASKS, now)
    counts = (report.used, report.pending, report.late, report.duplicates, report.unshown, report.other_tasks,
              report.unmatched_requests, report.unmatched_items)
    assert sum(counts) == len(found)

    def by_request(joined):
        both = zip(labels(joined, "click"), labels(joined, "rating"), strict=True)
        return dict(zip(joined.rows.request_id.tolist(), both, strict=True))

    expected = naive(served, shown, found, now)
    assert by_request(report) == expected
    # The same records read twice (overlapping segments), the repeats in the order of the first time.
    twice = join(pa.concat_tables([log, log]), outcomes(found + found), WINDOW, TASKS, now)
    assert by_request(twice) == expected and twice.duplicate_exposures == 3
    # What had not been received by `now` cannot have mattered; a later join adds requests and changes none.
    known = join(log, outcomes([row for row in found if row[4] <= now]), WINDOW, TASKS, now)
    assert by_request(known) == expected
    later = by_request(join(log, outcomes(found), WINDOW, TASKS, now + wait))
    assert {name: later[name] for name in expected} == expected


def naive(served, shown, found, now):
    out = {}
    for name, time in zip("abc", served, strict=True):
        if time + WINDOW > now:
            continue
        last = {}
        for _, item, task, value, received in sorted((o for o in found if o[0] == name), key=lambda o: o[4]):
            if received <= time + WINDOW:
                last[item, task] = value
        click, rating = [], []
        for item in range(3):
            state = shown[item]
            if (item, "shown") in last:
                state = last[item, "shown"] > 0
            if state is None and ((item, "click") in last or (item, "rating") in last):
                state = True
            click.append(last.get((item, "click"), 0.0) if state else None)
            rating.append(last.get((item, "rating")) if state else None)
        out[name] = (click, rating)
    return out
