"""MovieTweetings: ratings (0 to 10) that people tweeted; `ratings.dat`, `movies.dat`, `users.dat`, separated by `::`.

Items are IMDb numbers with leading zeros there. They become int64, which is smaller and loses nothing:
``f"tt{item_id:07d}"`` is the IMDb id.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from semel.datasets.dataset import Tables, build_features
from semel.datasets.delimited import read_delimited
from semel.datasets.movielens import columns_of, doubled, read_movies_dat, read_ratings_dat


def read_movietweetings(folder: Path) -> Tables:
    """``ratings.dat``, with ``movies.dat`` and ``users.dat`` (``user::twitter id``) where they are there."""
    events = read_ratings_dat(folder / "ratings.dat")
    items = read_movies_dat(folder / "movies.dat") if (folder / "movies.dat").is_file() else None
    users = None
    path = folder / "users.dat"
    if path.is_file():
        columns = {"user_id": pa.int64(), "twitter_id": pa.string()}
        raw = read_delimited(path, columns, delimiter=":", names=doubled(columns), quoted=False)
        users = build_features("user_id", columns_of(raw), str(path))
    return Tables(events, items, users)
