"""Amazon reviews in their layouts, and plain sequences."""

import gzip
import json

import pyarrow as pa
import pytest

from semel.datasets import detect, read

REVIEWS_2014 = [
    {"reviewerID": "A1YJEY40YUW4SE", "asin": "7806397051", "reviewerName": "Andréa", "helpful": [3, 4],
     "reviewText": "Very oily, \"creamy\"", "overall": 1.0, "unixReviewTime": 1391040000},
    {"reviewerID": "A60XNB876KYML", "asin": "B00004TMFE", "overall": 3.0, "unixReviewTime": 1397779200},
]
REVIEWS_2023 = [
    {"rating": 5.0, "title": "Such a lovely scent", "text": "…", "images": [], "asin": "B00YQ6X8EO",
     "parent_asin": "B0PARENT01", "user_id": "AGKHLEW2SOWHNMFQIJGBECAF7INQ", "timestamp": 1588687728923,
     "helpful_vote": 0, "verified_purchase": True},
]


def lines(values):
    return "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)


@pytest.mark.parametrize("zipped", [False, True])
def test_json_2014(tmp_path, zipped):
    path = tmp_path / ("reviews_Beauty_5.json.gz" if zipped else "reviews_Beauty_5.json")
    raw = lines(REVIEWS_2014).encode()
    path.write_bytes(gzip.compress(raw) if zipped else raw)
    # the 2014 descriptions are Python literals, not JSON
    (tmp_path / "meta_Beauty.json").write_text(
        "{'asin': '7806397051', 'title': \"Men's cream\", 'brand': 'X', 'price': 4.5, "
        "'categories': [['Beauty', 'Face'], ['Beauty', 'Oil']]}\n")
    data = read(tmp_path)
    assert data.events.to_pylist()[0] == {
        "user_id": "A1YJEY40YUW4SE", "item_id": "7806397051", "event_time": 1391040000_000000, "rating": 1.0}
    assert data.items.to_pylist() == [{"item_id": "7806397051", "title": "Men's cream", "brand": "X",
                                       "categories": "Beauty|Face|Oil", "price": 4.5}]
    assert data.action == "review"


def test_json_2023(tmp_path):
    (tmp_path / "All_Beauty.jsonl").write_text(lines(REVIEWS_2023))
    (tmp_path / "meta_All_Beauty.jsonl").write_text(lines([
        {"parent_asin": "B0PARENT01", "title": "Spray", "store": "Acme", "price": "from $12.50", "categories": []}]))
    data = read(tmp_path)
    assert data.events.to_pylist() == [{"user_id": "AGKHLEW2SOWHNMFQIJGBECAF7INQ", "item_id": "B0PARENT01",
                                        "event_time": 1588687728923_000, "rating": 5.0}]
    assert data.items.to_pylist()[0] == {
        "item_id": "B0PARENT01", "title": "Spray", "brand": "Acme", "categories": None, "price": None}


def test_csv_2014_without_header(tmp_path):
    (tmp_path / "ratings_Beauty.csv").write_text(
        "A39HTATAQ9V7YF,0205616461,5.0,1369699200\nA3JM6GV9MNOF9X,0558925278,3.0,1355443200\n")
    data = read(tmp_path / "ratings_Beauty.csv")
    assert data.events.to_pylist()[0] == {
        "user_id": "A39HTATAQ9V7YF", "item_id": "0205616461", "event_time": 1369699200_000000, "rating": 5.0}


def test_csv_2018_writes_the_item_first(tmp_path):
    (tmp_path / "Beauty.csv").write_text(
        "0143026860,A1V6B6TNIC10QE,1.0,1424304000\n0143026860,A2F5GHSXFQ0W6J,4.0,1418860800\n")
    data = read(tmp_path / "Beauty.csv")
    assert data.events["user_id"].to_pylist() == ["A1V6B6TNIC10QE", "A2F5GHSXFQ0W6J"]
    assert data.events["item_id"].to_pylist() == ["0143026860", "0143026860"]


@pytest.mark.parametrize("zipped", [False, True])
def test_csv_2023(tmp_path, zipped):
    text = b"user_id,parent_asin,rating,timestamp\nAGKHLEW2,B00YQ6X8EO,5.0,1588687728923\n"
    path = tmp_path / ("All_Beauty.csv.gz" if zipped else "All_Beauty.csv")
    path.write_bytes(gzip.compress(text) if zipped else text)
    assert read(path).events["event_time"].to_pylist() == [1588687728923_000]


@pytest.mark.parametrize(("text", "message"), [
    (lines(REVIEWS_2014) + "{oops\n", r"line 3: not JSON"),
    (lines([*REVIEWS_2014, {**REVIEWS_2014[0], "unixReviewTime": "soon"}]),
     r"line 3: column 'unixReviewTime' holds 'soon'"),
    (lines([REVIEWS_2014[0], {"asin": "B1", "overall": 1.0, "unixReviewTime": 1}]), r"line 2: no user_id"),
    (lines([{**REVIEWS_2014[0], "unixReviewTime": -1}]), r"line 1: event time -1000000 us is before 1970"),
])
def test_bad_json(tmp_path, text, message):
    (tmp_path / "reviews_5.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "reviews_5.json")


def test_sequences_have_positions_for_times(tmp_path):
    path = tmp_path / "Beauty.txt"
    path.write_text("1 10 20 30\n2 20\n1 40\n\n")
    data = read(path)
    assert detect(path)[0].name == "sequence"
    assert data.events.schema.types == [pa.int64()] * 3
    assert [tuple(row.values()) for row in data.events.to_pylist()] == [
        (1, 10, 1), (1, 20, 2), (1, 30, 3), (2, 20, 1), (1, 40, 4)]
    assert data.items is None and any("position" in note for note in data.notes)


def test_pairs_and_words_are_sequences_too(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("über item-1\nüber item-2\n7 007\n")
    assert [tuple(row.values()) for row in read(path).events.to_pylist()] == [
        ("über", "item-1", 1), ("über", "item-2", 2), ("7", "007", 1)]


@pytest.mark.parametrize(("text", "message"), [
    ("1 10\n2\n", "line 2: a user without items"), ("", "the file is empty"), ("\n \n", "known layout|empty"),
])
def test_bad_sequences(tmp_path, text, message):
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "bad.txt")
