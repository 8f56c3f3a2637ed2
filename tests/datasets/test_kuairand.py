"""KuaiRand's files: events with all labels, requests from impressions, features that do not leak."""

import pytest
from dataset_files import KUAIRAND_HEAD, kuairand, kuairand_log

from semel.datasets import detect, read


@pytest.mark.parametrize(("ending", "parts"), [("pure", ("",)), ("1k", ("",)), ("27k", ("_part1", "_part2"))])
def test_layouts(tmp_path, ending, parts):
    layout, where = detect(kuairand(tmp_path, ending, parts))
    data = read(tmp_path)
    assert (layout.name, where.name) == ("kuairand", "data")
    assert data.events.num_rows == 3 * len(parts) + 2
    assert data.events["item_id"].to_pylist()[-2:] == [7, 8], "the random log comes last"
    assert "CC BY-SA 4.0" in data.licence


def test_events_keep_their_labels(tmp_path):
    data = read(kuairand(tmp_path))
    first = data.events.to_pylist()[0]
    assert first["event_time"] == 1649404800000_000
    assert (first["is_click"], first["long_view"], first["is_like"], first["play_time_ms"]) == (1, 1, 0, 1000.0)
    assert data.events["is_rand"].to_pylist() == [0, 0, 0, 0, 1]


def test_one_request_from_impressions_of_one_instant(tmp_path):
    requests = read(kuairand(tmp_path)).impressions.to_pylist()
    assert [request["candidates"] for request in requests] == [[5, 6], [5], [7], [8]]
    assert requests[0]["click"] == [1.0, 0.0] and requests[0]["shown"] == [True, True]
    assert requests[0]["as_of"] == 1649404800000_000, "a request sees what was strictly before it"
    assert [request["surface"] for request in requests] == ["1", "0", "4", "1"]
    assert requests[3]["random"] == [1.0]
    assert len({request["request_id"] for request in requests}) == 4


def test_features(tmp_path):
    data = read(kuairand(tmp_path))
    video = data.items.to_pylist()[0]
    assert video["tags"] == "12|65" and video["author_id"] == 50
    assert video["event_time"] == 1648742400_000000, "2022-04-01 in Beijing is 16:00 UTC of the day before"
    assert data.items["event_time"].to_pylist()[1] == 0
    assert not any("count" in name for name in data.items.column_names), "statistics over the period would leak"
    assert data.users.to_pylist()[0]["user_active_degree"] == "full_active"


def test_bad_log(tmp_path):
    folder = kuairand(tmp_path)
    path = next(folder.rglob("log_random*"))
    path.write_text(kuairand_log((0, 8, -1, 1, 1, 1)))
    with pytest.raises(ValueError, match=r"log_random.*line 2: event time -1000 us is before 1970"):
        read(folder)
    path.write_text(KUAIRAND_HEAD.replace("long_view,", ""))
    with pytest.raises(ValueError, match=r"log_random.*no column 'long_view'"):
        read(folder)


def test_bad_users(tmp_path):
    folder = kuairand(tmp_path)
    path = next(folder.rglob("user_features*"))
    path.write_text("user,age\n1,2\n")
    with pytest.raises(ValueError, match=r"user_features.*no column 'user_id'.*did you mean 'user'"):
        read(folder)
    path.write_text("user_id,age\nx,2\n")
    with pytest.raises(ValueError, match=r"user_features_pure\.csv: .*'x'"):
        read(folder)
