"""``fetch``: a named data set, from wherever it can be had; the first place that has it wins."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from semel.datasets.dataset import Dataset, Progress
from semel.datasets.layouts import LAYOUTS, Layout, as_dataset, detect
from semel.datasets.published import Published, published
from semel.datasets.sources import Source, Unavailable, from_publisher, from_wheel, is_archive, patterns_in, unpack


class DatasetNotFound(FileNotFoundError):
    """No place had the data set; the message lists each one and why, and how to pass a path instead."""


def cache_root() -> Path:
    """The folder under the user's cache directory that keeps fetched data sets, one folder a name."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("semel", appauthor=False))


def fetch(name: str, data: Path | None = None, progress: Progress | None = None, *, cache: Path | None = None,
          sources: Sequence[Source] = (from_publisher, from_wheel)) -> Dataset:
    """The data set called ``name``: from ``data`` where given (a folder, a file, the publisher's archive or the wheel;
    then nothing else is tried), else from the cache, else from ``sources`` in order, which fill the cache.

    ``cache``: another folder in place of the user's. A place that cannot be reached is not an error but the next
    place's turn. Raises KeyError for an unknown name, ``DatasetNotFound`` (a FileNotFoundError) where no place has it,
    ValueError for data that cannot be read.
    """
    entry = published(name)
    if data is not None:
        return _from_path(entry, Path(data))
    folder = (cache or cache_root()) / name
    tried = []
    if not folder.is_dir():
        if not entry.downloads and not entry.wheel:
            raise DatasetNotFound(f"{name} has no address to fetch it from: get it from {entry.page} and pass its "
                                  "folder or file: --data PATH (in Python: data=PATH)")
        tried.append(f"cache {folder}: not there")
        for source in sources:
            try:
                fill_cache(entry, folder, source, progress)
                break
            except Unavailable as error:
                tried.append(f"{_title(source, entry)}: {error}")
        else:
            raise DatasetNotFound(
                f"{name} is nowhere to be had. Tried: {'; '.join(tried)}. Get it from {entry.page} and pass its folder "
                "or archive: --data PATH (in Python: data=PATH)")
    try:
        return _from_folder(entry, folder, _source_of(folder))
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{error}; remove the cached copy to fetch it again (rm -r {folder})") from None


def fill_cache(entry: Published, folder: Path, source: Source, progress: Progress | None = None) -> None:
    """Brings a data set into ``folder`` in one step: it is made beside and renamed, so a half one is never seen.

    Raises Unavailable where the source cannot give it or gives something else.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{entry.name}."))
    try:
        origin = source(entry, made, progress)
        try:
            _checked_layout(entry, made)
        except (ValueError, FileNotFoundError) as error:
            raise Unavailable(f"what came is not {entry.name}: {error}") from None
        note = {"name": entry.name, "source": origin, "fetched": datetime.now(UTC).isoformat(timespec="seconds")}
        (made / "source.json").write_text(json.dumps(note, indent=2) + "\n")
        try:
            os.rename(made, folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its copy is as good
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _from_path(entry: Published, path: Path) -> Dataset:
    if not (path.is_file() and is_archive(path)):
        return _from_folder(entry, path, str(path))
    with tempfile.TemporaryDirectory(prefix="semel.") as scratch:
        try:
            unpack(path, Path(scratch), patterns_in(entry, path))
        except Unavailable as error:
            raise ValueError(f"{path}: {error}") from None
        return _from_folder(entry, Path(scratch), str(path))


def _from_folder(entry: Published, folder: Path, source: str) -> Dataset:
    layout, where = _checked_layout(entry, folder)
    return as_dataset(layout.read(where), layout, entry.name, source)


def _checked_layout(entry: Published, folder: Path) -> tuple[Layout, Path]:
    layout, where = detect(folder)
    if layout.name in entry.layouts:
        return layout, where
    for expected in LAYOUTS:  # a damaged file is better named by its own reader than called another layout
        if expected.name in entry.layouts and layout.name == "events" and where.match(expected.keep[0]):
            return expected, where.parent
    raise ValueError(f"{where}: laid out as {layout.name} ({layout.files}), but {entry.name} is "
                     f"{' or '.join(entry.layouts)}")


def _source_of(folder: Path) -> str:
    try:
        return str(json.loads((folder / "source.json").read_text())["source"])
    except (OSError, ValueError, KeyError):
        return str(folder)


def _title(source: Source, entry: Published) -> str:
    if source is from_publisher:
        return entry.downloads[0].url if entry.downloads else "publisher"
    if source is from_wheel:
        return f"PyPI {entry.wheel.requirement}" if entry.wheel else "PyPI"
    return getattr(source, "__name__", repr(source))
