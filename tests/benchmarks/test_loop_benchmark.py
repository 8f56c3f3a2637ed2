"""What the loop's benchmark prints, and when it says that a must was missed. Its loops run in tests/loop."""

import copy

from benchmarks.loop import met, rows_of

ONE = {
    "seconds": 60.0, "requests": 600,
    "kills": [{"process": "server", "back_s": 4.0}, {"process": "driver", "back_s": None}],
    "failed": {}, "duplicates": {}, "stale_reads": 0, "versions": 9,
    "item_shown_s": {"p50": 0.5, "p90": 0.9, "p99": 1.4}, "items_shown": 20, "items_unseen": 0, "p50_ms": 10.0,
    "p99_ms": 40.0, "gap_over_time": [(5.0, 0.3), (55.0, 0.2)], "skew": 0.001, "served_ne": 0.9, "frozen_ne": 0.95,
    "labels": 100,
    "verification": {
        "good": True, "events": 100, "events_lost": 0, "events_repeated": 0, "outcomes": 200, "outcomes_lost": 0,
        "outcomes_repeated": 0, "items": 20, "items_lost": 0, "coverage": 1.0,
        "replayed": {"requests": 600, "histories_equal": 600, "bit_equal": 600},
        "growth": {"server": {"before_mb": 250.0, "after_mb": 252.0, "mb_per_minute": 0.2}}},
}


def changed(**changes):
    return {**copy.deepcopy(ONE), **changes}


def test_rows_say_what_was_measured_and_what_must_be():
    table = rows_of(changed(), changed(kills=[]))
    rows = {name.strip(): (value, must) for name, value, must in table}
    assert rows["a new item, from upload to first shown: p50, p99"] == ("0.50, 1.40 s of 20", "p99 <= 5 s")
    assert rows["versions served, failed attempts"] == ("9, 0", "0 failed")
    assert rows["gap to the best NE over time"][0] == "0.3000 0.2000"
    assert rows["kills, and seconds until back (median)"][0] == "server 1: 4.0, driver 1: nan"


def test_musts():
    assert met(changed(failed={"rank: no connection": 3}), changed())  # a kill costs attempts, nothing else may
    assert not met(changed(), changed(failed={"rank: 500": 1}))
    assert not met(changed(item_shown_s={"p50": 1.0, "p90": 2.0, "p99": 5.5}), changed())
    assert not met(changed(verification={**ONE["verification"], "good": False}), changed())
