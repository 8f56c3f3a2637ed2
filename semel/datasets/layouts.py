"""The layouts that can be read, and how each is recognised from the files that are there."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from semel.datasets import amazon, kuairand, movielens, movietweetings, recbole, sequence, table
from semel.datasets.dataset import Dataset, Tables
from semel.datasets.delimited import first_line, read_header

GROUPLENS = ("MovieLens, GroupLens: research use; non-commercial, no redistribution without permission; cite "
             "F. M. Harper and J. A. Konstan, The MovieLens Datasets: History and Context, ACM TiiS 5(4), 2015")
DOOMS = "MovieTweetings, S. Dooms, Ghent University: MIT licence"
MCAULEY = ("Amazon reviews, McAuley lab, UC San Diego: research use; no licence is stated; cite the edition's paper "
           "(2014: He and McAuley; 2018: Ni et al.; 2023: Hou et al.)")
KUAISHOU = "KuaiRand, Kuaishou and USTC: CC BY-SA 4.0; cite Gao et al., CIKM 2022"
UNKNOWN = "not stated by this layout; the terms of whoever published the data hold"
OWN = "your own data"


@dataclass(frozen=True)
class Layout:
    """One way in which events lie on disk. ``files``: what it looks like, for people; ``matches``: whether a path looks
    so (a folder, or a file for single-file layouts; reads a line at most); ``read``: path -> Tables; ``keep``: which
    files of an archive it needs (patterns of names, the events first)."""

    name: str
    files: str
    licence: str
    action: str | None
    matches: Callable[[Path], bool]
    read: Callable[[Path], Tables]
    keep: tuple[str, ...] = ()


def _has(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and all((path / name).is_file() for name in names)


def _header(path: Path, *names: str) -> bool:
    return path.is_file() and set(names) <= set(read_header(path))


def _is_100k(path: Path) -> bool:
    return _has("u.data")(path)


def _is_csv(path: Path) -> bool:
    return _has("ratings.csv")(path) and _header(path / "ratings.csv", "userId", "movieId", "rating", "timestamp")


def _is_movietweetings(path: Path) -> bool:
    """``ratings.dat`` is MovieLens' name too; here items carry seven digits, zeros first."""
    if not _has("ratings.dat")(path):
        return False
    fields = first_line(path / "ratings.dat").split("::")
    return len(fields) == 4 and len(fields[1]) >= 7


def _is_kuairand(path: Path) -> bool:
    return path.is_dir() and (any(path.glob("log_standard_*.csv")) or any(path.glob("log_random_*.csv")))


def _json_with(*keys: str) -> Callable[[Path], bool]:
    def matches(path: Path) -> bool:
        return path.is_file() and ".json" in path.name and set(keys) <= amazon.keys_of(amazon.peek(path))
    return matches


def _is_csv_2023(path: Path) -> bool:
    return (path.is_file() and path.name.endswith((".csv", ".csv.gz"))
            and set(amazon.KEYS_2023) <= set(amazon.peek(path).split(",")))


def _is_csv_2014(path: Path) -> bool:
    if not (path.is_file() and path.name.endswith((".csv", ".csv.gz"))):
        return False
    fields = amazon.peek(path).split(",")
    return len(fields) == 4 and fields[2].replace(".", "", 1).isdigit() and fields[3].isdigit()


def _is_sequence(path: Path) -> bool:
    line = amazon.peek(path) if path.is_file() and path.suffix in (".txt", ".inter_seq", ".seq") else ""
    words = line.split()
    return len(words) >= 2 and "::" not in line and "," not in line


def _is_table(path: Path) -> bool:
    if path.is_dir():
        return any((path / f"events{ending}").is_file() for ending in table.ENDINGS)
    return path.is_file() and path.name.endswith(table.ENDINGS)


LAYOUTS: tuple[Layout, ...] = (
    Layout("movielens-100k", "u.data, u.item, u.user", GROUPLENS, "rating", _is_100k, movielens.read_100k,
           ("u.data", "u.item", "u.user", "README*")),
    Layout("movielens-csv", "ratings.csv, movies.csv", GROUPLENS, "rating", _is_csv, movielens.read_csv,
           ("ratings.csv", "movies.csv", "README*")),
    Layout("movietweetings", "ratings.dat, movies.dat (IMDb ids)", DOOMS, "rating", _is_movietweetings,
           movietweetings.read_movietweetings, ("ratings.dat", "movies.dat", "users.dat", "LICENSE*")),
    Layout("movielens-dat", "ratings.dat, movies.dat, users.dat", GROUPLENS, "rating", _has("ratings.dat"),
           movielens.read_dat, ("ratings.dat", "movies.dat", "users.dat", "README*")),
    Layout("movielens-recbole", "*.inter, *.item, *.user", GROUPLENS, "rating",
           lambda path: path.is_dir() and any(path.glob("*.inter")), recbole.read_recbole,
           ("*.inter", "*.item", "*.user")),
    Layout("kuairand", "log_standard_*.csv, log_random_*.csv, user_features_*.csv, video_features_basic_*.csv",
           KUAISHOU, "impression", _is_kuairand, kuairand.read_kuairand,
           ("log_*.csv", "user_features_*.csv", "video_features_basic_*.csv", "LICENSE*")),
    Layout("amazon-2014-json", "reviews_*_5.json[.gz]", MCAULEY, "review", _json_with(*amazon.KEYS_2014),
           amazon.read_json_2014),
    Layout("amazon-2023-json", "*.jsonl[.gz]", MCAULEY, "review", _json_with(*amazon.KEYS_2023), amazon.read_json_2023),
    Layout("amazon-2023-csv", "*.csv[.gz] with user_id,parent_asin,rating,timestamp", MCAULEY, "review", _is_csv_2023,
           amazon.read_csv_2023),
    Layout("amazon-2014-csv", "ratings_*.csv without a header", MCAULEY, "review", _is_csv_2014,
           amazon.read_csv_2014),
    Layout("sequence", "*.txt of lines 'user item item ...'", UNKNOWN, "interaction", _is_sequence,
           sequence.read_sequences),
    Layout("events", "a Parquet or CSV table, or a folder with events.parquet, items.parquet, users.parquet", OWN, None,
           _is_table, table.read_events),
)


def detect(path: Path) -> tuple[Layout, Path]:
    """The layout of the data at ``path`` and where exactly it lies.

    That is ``path`` itself, a folder of ``path`` (archives unpack to ``ml-1m/``, KuaiRand to ``KuaiRand-1K/data/``), or
    its only data file. Raises FileNotFoundError where there is nothing, ValueError where no layout is recognised.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    for candidate in _places(path):
        for layout in LAYOUTS:
            if layout.matches(candidate):
                return layout, candidate
    if path.is_file() and zipfile.is_zipfile(path):
        raise ValueError(f"{path}: an archive; name its data set (ml-1m, ...) so that it can be unpacked")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty")
    if path.is_dir():
        names = sorted(p.name for p in path.iterdir())
        found = (", ".join(names[:8]) + (", ..." if len(names) > 8 else "")) or "nothing"
    else:
        found = f"a file that starts with {amazon.peek(path)[:60]!r}"
    known = "; ".join(f"{layout.name}: {layout.files}" for layout in LAYOUTS)
    raise ValueError(f"{path}: no known layout, found {found}. Known are {known}")


def read(path: Path, name: str | None = None, *, columns: table.EventColumns | None = None) -> Dataset:
    """The data set at ``path`` in whatever layout it has, called ``name`` (default: the file's or folder's name).
    ``columns``: it is a plain table, with these columns, whatever it looks like.

    Raises FileNotFoundError where there is nothing, ValueError naming file, line and column for what cannot be read.
    """
    path = Path(path)
    if columns is not None:
        return as_dataset(table.read_events(path, columns), LAYOUTS[-1], name or path.stem, str(path))
    layout, where = detect(path)
    return as_dataset(layout.read(where), layout, name or where.stem, str(where))


def as_dataset(tables: Tables, layout: Layout, name: str, source: str) -> Dataset:
    action = None if "action" in tables.events.column_names else layout.action
    return Dataset(name, tables.events, tables.items, tables.users, layout.licence, source, tables.impressions, action,
                   tables.notes)


def _places(path: Path) -> list[Path]:
    """The path, then folders up to two below it, then its only file that is not a description."""
    if not path.is_dir():
        return [path]
    places = [path]
    below = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    for folder in below[:16]:
        places += [folder, *sorted(p for p in folder.iterdir() if p.is_dir())[:16]]
    files = [p for p in path.iterdir() if p.is_file() and not p.name.startswith((".", "meta_", "README", "LICENSE"))
             and p.name != "source.json"]
    return places + (files if len(files) == 1 else [])
