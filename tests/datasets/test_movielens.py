"""MovieLens and MovieTweetings: each layout on a few lines, then the real files."""

import gzip
import zipfile

import pytest
from dataset_files import atomic_1m, ml_1m, ml_100k, write

from semel.datasets import Dataset, detect, read


def rows(table):
    return table.to_pylist()


def test_100k(tmp_path):
    data = read(ml_100k(tmp_path / "ml-100k"))
    assert rows(data.events) == [
        {"user_id": 7, "item_id": 2, "event_time": 881250949_000000, "rating": 3.0},
        {"user_id": 7, "item_id": 1, "event_time": 881250949_000000, "rating": 5.0},
        {"user_id": 9, "item_id": 1, "event_time": 881250900_000000, "rating": 4.0},
    ]
    assert rows(data.items) == [
        {"item_id": 1, "title": "Toy Story", "year": 1995, "genres": "Animation|Children's|Comedy"},
        {"item_id": 2, "title": "Misérables, Les", "year": 1995, "genres": None},
        {"item_id": 3, "title": "unknown", "year": None, "genres": "unknown"},
    ]
    assert rows(data.users)[1] == {
        "user_id": 9, "age": "53", "gender": "F", "occupation": "other", "zip_code": "T8H1N"}
    assert (data.name, data.action) == ("ml-100k", "rating")
    assert "non-commercial" in data.licence and "2015" in data.licence


def test_dat_in_latin_1_with_colons_in_titles(tmp_path):
    data = read(ml_1m(tmp_path / "ml-1m"))
    assert rows(data.events)[:2] == [
        {"user_id": 1, "item_id": 1193, "event_time": 978300760_000000, "rating": 5.0},
        {"user_id": 1, "item_id": 661, "event_time": 978302109_000000, "rating": 3.0}]
    assert rows(data.items) == [
        {"item_id": 661, "title": "James and the Giant Peach: a film", "year": 1996, "genres": "Animation|Children's"},
        {"item_id": 1193, "title": "Misérables, Les", "year": 1995, "genres": "Drama"}]
    assert rows(data.users)[0] == {"user_id": 1, "age": "1", "gender": "F", "occupation": "10", "zip_code": "48067"}


def test_csv(tmp_path):
    folder = write(
        tmp_path / "ml-latest-small",
        ratings__csv="userId,movieId,rating,timestamp\n1,2,4.5,964982703\n1,2,4.5,964982703\n",
        movies__csv='movieId,title,genres\n1,"American President, The (1995)",Comedy|Drama\n'
                    "2,Cosmos,(no genres listed)\n3,Æon – ""Flux"" (2006),Sci-Fi\n")
    data = read(folder)
    assert data.events.num_rows == 2, "repeated rows are events too"
    assert rows(data.events)[0] == {"user_id": 1, "item_id": 2, "event_time": 964982703_000000, "rating": 4.5}
    assert rows(data.items)[0] == {
        "item_id": 1, "title": "American President, The", "year": 1995, "genres": "Comedy|Drama"}
    assert rows(data.items)[1] == {"item_id": 2, "title": "Cosmos", "year": None, "genres": None}
    assert data.users is None


def test_csv_whose_header_is_quoted(tmp_path):
    folder = write(tmp_path / "ml", ratings__csv='\ufeff"userId","movieId","rating","timestamp"\n1,2,4.5,964982703\n')
    assert read(folder).events["item_id"].to_pylist() == [2]


def test_atomic_files_whose_items_are_titles(tmp_path):
    data = read(atomic_1m(tmp_path / "ml-1m"))
    assert rows(data.events) == [
        {"user_id": 2, "item_id": 3, "event_time": 978300760_000000, "rating": 5.0},
        {"user_id": 2, "item_id": 1, "event_time": 978300760_500000, "rating": 4.5},
        {"user_id": 10, "item_id": 3, "event_time": 978300761_000000, "rating": 1.0}]
    assert rows(data.items) == [
        {"item_id": 1, "title": 'Cinéma "Paradiso"', "year": 1988, "genres": "Drama"},
        {"item_id": 2, "title": "Unseen", "year": None, "genres": None},
        {"item_id": 3, "title": "Heat", "year": 1995, "genres": "Action|Crime|Thriller"}]
    assert rows(data.users)[0] == {"user_id": 2, "age": "56", "gender": "M", "occupation": "16", "zip_code": "70072"}
    assert "not the publisher's ids" in data.notes[0]


def test_atomic_files_keep_numbers_as_ids(tmp_path):
    folder = write(
        tmp_path / "ml-100k",
        ml__inter="user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n",
        ml__item="item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
                 "242\tKolya\t1996\tComedy Drama\n267\tunknown\tV\tunknown\n")
    data = read(folder)
    assert rows(data.events)[0]["item_id"] == 242
    assert rows(data.items) == [
        {"item_id": 242, "title": "Kolya", "year": 1996, "genres": "Comedy|Drama"},
        {"item_id": 267, "title": "unknown", "year": None, "genres": "unknown"}]


def test_atomic_files_with_an_item_that_is_not_listed(tmp_path):
    folder = atomic_1m(tmp_path / "ml-1m")
    with open(folder / "ml_1m.inter", "a", encoding="utf8") as file:
        file.write("1m_3\tNowhere (2000)\t5\t978300760\n")
    with pytest.raises(ValueError, match=r"'Nowhere \(2000\)' is not in the \.item file"):
        read(folder)


def test_movietweetings_ids_lose_their_zeros(tmp_path):
    folder = write(tmp_path / "mt", ratings__dat="1::0002844::7::1365029107\n2::0113277::10::1365029107\n",
                   movies__dat="0002844::Fantômas - À l'ombre (1913)::Crime|Drama\n0113277::Heat (1995)::\n",
                   users__dat="1::139564917\n2::522540374\n")
    layout, _ = detect(folder)
    data = read(folder)
    assert layout.name == "movietweetings" and "MIT" in data.licence
    assert [f"tt{item:07d}" for item in data.events["item_id"].to_pylist()] == ["tt0002844", "tt0113277"]
    assert rows(data.items)[0] == {
        "item_id": 2844, "title": "Fantômas - À l'ombre", "year": 1913, "genres": "Crime|Drama"}
    assert rows(data.users)[1] == {"user_id": 2, "twitter_id": "522540374"}


def test_an_unpacked_archive_is_found_below(tmp_path):
    ml_1m(tmp_path / "download" / "ml-1m")
    layout, where = detect(tmp_path / "download")
    assert (layout.name, where.name) == ("movielens-dat", "ml-1m")


def bad(tmp_path, text, name="ratings.csv"):
    folder = tmp_path / "bad"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


HEAD = "userId,movieId,rating,timestamp\n"


@pytest.mark.parametrize(("text", "message"), [
    (HEAD + "1,2,4.0,964982703\n1,2,4.0,yesterday\n", r"ratings\.csv, line 3: column 'timestamp' holds 'yesterday'"),
    (HEAD + "1,2,4.0,-5\n", r"ratings\.csv, line 2: event time -5000000 us is before 1970"),
    (HEAD + "1,2,4.0,\n", r"ratings\.csv, line 2: no event time"),
    (HEAD + "1,2,4.0,964982703\n,2,4.0,964982703\n", r"ratings\.csv, line 3: no user_id"),
    (HEAD + "1,2,4.0,964982703000\n", r"ratings\.csv, line 2: event time \d+ us is after 2200; is the unit right"),
    (HEAD + "1,2,4.0,9649827030000000\n", r"ratings\.csv: event times in s overflow"),
    (HEAD + "1,2,high,964982703\n", r"line 2: column 'rating' holds 'high', which is no number"),
    (HEAD + "x1,2,4,964982703\n", r"line 2: column 'userId' holds 'x1', which is no whole number"),
    (HEAD + "1,2,4.0\n", r"ratings\.csv: .*Expected 4 columns, got 3"),
    (HEAD, r"ratings\.csv: no events in it"),
])
def test_bad_csv_names_file_line_and_column(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        read(bad(tmp_path, text))


@pytest.mark.parametrize(("name", "text", "message"), [
    ("ratings.csv", "", r"ratings\.csv: the file is empty"),
    ("ratings.csv", "userId,film,rating,timestamp\n1,2,3,4\n", r"ratings\.csv: no column 'user_id'"),
    ("u.data", "1\t2\t3\n", r"u\.data: .*Expected 4 columns, got 3"),
    ("ratings.dat", "1::2::x::978300760\n", r"ratings\.dat, line 1: column 'rating' holds 'x'"),
    ("movies.dat", "0001 Heat\n", "no known layout"),
    ("ratings.dat", "1::2::3::978300760::9\n", r"ratings\.dat: .*Expected 7 columns, got 9"),
])
def test_other_bad_files(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read(bad(tmp_path, text, name))


def test_a_bad_line_of_movies_dat_is_named(tmp_path):
    folder = ml_1m(tmp_path / "ml-1m")
    (folder / "movies.dat").write_text("661::James (1996)::Drama\nHeat (1995)\n")
    with pytest.raises(ValueError, match=r"movies\.dat, line 2: expected id::title::genres, got 'Heat \(1995\)'"):
        read(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read(tmp_path / "absent")
    with pytest.raises(ValueError, match="no known layout, found nothing"):
        read(tmp_path)


def test_an_archive_says_that_it_wants_a_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as bundle:
        bundle.writestr("ml-1m/ratings.dat", "1::2::3::4\n")
    with pytest.raises(ValueError, match="name its data set"):
        read(tmp_path / "ml-1m.zip")


def test_real_latest_small(shared_data):
    data: Dataset = read(shared_data / "ml-latest-small")
    assert data.events.num_rows == 100_836
    assert data.events["user_id"].value_counts().__len__() == 610
    assert data.items.num_rows == 9_742
    assert rows(data.events)[0] == {"user_id": 1, "item_id": 1, "event_time": 964982703_000000, "rating": 4.0}
    titles = dict(zip(data.items["item_id"].to_pylist(), data.items["title"].to_pylist(), strict=True))
    assert titles[1] == "Toy Story" and titles[40697] == "Babylon 5"


def test_real_movietweetings(shared_data):
    data = read(shared_data / "movietweetings-100k")
    assert data.events.num_rows == 100_000
    assert len(data.events["user_id"].unique()) == 16_554
    assert len(data.events["item_id"].unique()) == 10_506 == data.items.num_rows
    assert data.items["title"][0].as_py() == "Fantômas - À l'ombre de la guillotine"


def test_gzip_is_no_layout_of_movielens(tmp_path):
    with gzip.open(tmp_path / "ratings.dat.gz", "wt") as file:
        file.write("1::2::3::4\n")
    with pytest.raises(ValueError, match="no known layout"):
        read(tmp_path)
