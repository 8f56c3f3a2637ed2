"""MovieLens, in the publisher's three layouts: ``u.data`` (100k), ``ratings.dat`` (1M, 10M), ``ratings.csv`` (later).

All give ``rating`` (float32) with the events, ``title`` (without its year), ``year`` (int32) and ``genres`` with the
items. Times are in seconds there. Ids are the publisher's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from semel.datasets.dataset import Tables, build_events, build_features, joined
from semel.datasets.delimited import microseconds, read_delimited, require_file

GENRES_100K = ("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama",
               "Fantasy", "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War",
               "Western")

_TITLE = re.compile(r"^(.*?)\s*\((\d{4})(?:[-–]\d{0,4})?\)\s*$")


def read_100k(folder: Path) -> Tables:
    """``u.data`` (tab separated), with ``u.item`` and ``u.user`` (latin-1, ``|`` separated) where they are there."""
    path = folder / "u.data"
    types = {"user_id": pa.int64(), "item_id": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
    table = read_delimited(path, types, delimiter="\t", names=list(types), quoted=False)
    items = users = None
    if (folder / "u.item").is_file():
        items = _items_100k(folder / "u.item")
    if (folder / "u.user").is_file():
        columns = {"user_id": pa.int64(), "age": pa.string(), "gender": pa.string(), "occupation": pa.string(),
                   "zip_code": pa.string()}
        raw = read_delimited(folder / "u.user", columns, delimiter="|", names=list(columns), quoted=False,
                             encoding="latin-1")
        users = build_features("user_id", columns_of(raw), str(folder / "u.user"))
    return Tables(ratings(table, str(path)), items, users)


def _items_100k(path: Path) -> pa.Table:
    flags = {f"genre {name}": pa.int8() for name in GENRES_100K}
    columns = {"item_id": pa.int64(), "title": pa.string(), "released": pa.string(), "video": pa.string(),
               "url": pa.string(), **flags}
    raw = read_delimited(path, columns, delimiter="|", names=list(columns), quoted=False, encoding="latin-1")
    rows = zip(*(raw[name].to_pylist() for name in flags), strict=True)
    genres = [[name for name, flag in zip(GENRES_100K, row, strict=True) if flag] for row in rows]
    return titled(raw["item_id"], raw["title"].to_pylist(), genres, str(path))


def read_dat(folder: Path) -> Tables:
    """``ratings.dat`` (``::`` separated), with ``movies.dat`` and ``users.dat`` where they are there."""
    events = read_ratings_dat(folder / "ratings.dat")
    items = read_movies_dat(folder / "movies.dat") if (folder / "movies.dat").is_file() else None
    path = folder / "users.dat"
    if not path.is_file():
        return Tables(events, items)
    columns = {"user_id": pa.int64(), "gender": pa.string(), "age": pa.string(), "occupation": pa.string(),
               "zip_code": pa.string()}
    raw = read_delimited(path, columns, delimiter=":", names=doubled(columns), quoted=False, encoding="latin-1")
    order = ("user_id", "age", "gender", "occupation", "zip_code")
    return Tables(events, items, build_features("user_id", {name: raw[name] for name in order}, str(path)))


def read_ratings_dat(path: Path) -> pa.Table:
    """``user::item::rating::seconds``. A single ``:`` is the delimiter and every other field is empty: much faster
    than splitting lines in Python, and no field of this file has a colon."""
    types = {"user_id": pa.int64(), "item_id": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
    return ratings(read_delimited(path, types, delimiter=":", names=doubled(types), quoted=False), str(path))


def read_movies_dat(path: Path) -> pa.Table:
    """``item::title (year)::genre|genre``, in UTF-8 or else latin-1; titles may hold single colons."""
    require_file(path)
    raw = path.read_bytes()
    try:
        text = raw.decode("utf8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    ids, titles, genres = [], [], []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line:
            continue
        fields = line.split("::")
        if len(fields) < 2 or not fields[0].isdigit():
            raise ValueError(f"{path}, line {number}: expected id::title::genres, got {line[:80]!r}")
        ids.append(int(fields[0]))
        titles.append(fields[1])
        genres.append([genre for genre in fields[2].split("|") if genre] if len(fields) > 2 else [])
    return titled(pa.array(ids, pa.int64()), titles, genres, str(path))


def read_csv(folder: Path) -> Tables:
    """``ratings.csv`` (userId, movieId, rating, timestamp), with ``movies.csv`` where it is there; no users."""
    path = folder / "ratings.csv"
    types = {"userId": pa.int64(), "movieId": pa.int64(), "rating": pa.float32(), "timestamp": pa.int64()}
    table = read_delimited(path, types, quoted=False).rename_columns(["user_id", "item_id", "rating", "timestamp"])
    items = None
    movies = folder / "movies.csv"
    if movies.is_file():
        raw = read_delimited(movies, {"movieId": pa.int64(), "title": pa.string(), "genres": pa.string()})
        genres = [[] if text in (None, "(no genres listed)") else text.split("|") for text in raw["genres"].to_pylist()]
        items = titled(raw["movieId"], raw["title"].to_pylist(), genres, str(movies), first_line=2)
    return Tables(ratings(table, str(path), first_line=2), items)


def ratings(table: pa.Table, where: str, first_line: int = 1) -> pa.Table:
    """user_id, item_id, rating, timestamp (seconds) -> the events table."""
    time = microseconds(table["timestamp"], "s", where, first_line)
    return build_events({"user_id": table["user_id"], "item_id": table["item_id"], "event_time": time,
                         "rating": table["rating"]}, where, first_line)


def titled(ids: pa.ChunkedArray | pa.Array, titles: Sequence[str | None], genres: list[list[str]], where: str,
           first_line: int = 1) -> pa.Table:
    """The items table from titles that end in their year."""
    split = [split_title(title) for title in titles]
    columns = {"item_id": ids, "title": pa.array([title for title, _ in split], pa.string()),
               "year": pa.array([year for _, year in split], pa.int32()), "genres": joined(genres)}
    return build_features("item_id", columns, where, first_line)


def split_title(title: str | None) -> tuple[str | None, int | None]:
    """``"Heat (1995)"`` -> ``("Heat", 1995)``; a title without a year keeps None."""
    match = _TITLE.match(title) if title else None
    return (match.group(1), int(match.group(2))) if match else (title, None)


def doubled(names: dict[str, pa.DataType]) -> list[str]:
    """Column names of a ``::`` separated file that is read with ``:`` as its delimiter."""
    out: list[str] = []
    for name in names:
        out += [name, f"empty {len(out)}"]
    return out[:-1]


def columns_of(table: pa.Table) -> dict[str, pa.ChunkedArray]:
    return {name: table[name] for name in table.column_names}


def year_of(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Strings or numbers -> int32 years, null where there is none (sources also write ranges and words)."""
    found = pc.extract_regex(text.cast(pa.string()), r"^(?P<year>\d{4})")
    return pc.struct_field(found, "year").cast(pa.int32())
