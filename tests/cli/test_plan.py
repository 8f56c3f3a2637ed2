"""``semel plan``: results for people and for programs, files, and one clear line for bad input."""

import json

import pytest

CLUSTER = """
name = "two buildings"
[device]
name = "small"
memory = "3 GB"
memory_bandwidth = "1 TB/s"
matmul = 0.5
attention = 0.4
vector = 0.8
kernel = "2 us"
reserved = "0 B"
price = "2 $/h"
peak = { bf16 = "100 Tflop/s" }
[[levels]]
name = "host"
count = 4
bandwidth = "100 GB/s"
latency = "1 us"
domain = true
[[levels]]
name = "building"
count = 2
bandwidth = "50 Gbit/s"
latency = "20 us"
oversubscription = 2
"""
JOB = """
kind = "transformer"
layers = 8
width = 1024
feedforward = 4096
heads = 8
vocabulary = 8000
sequence = 1024
batch = 16
"""
SEARCH = """
axes = ["tp", "pp", "dp"]
schedules = ["1f1b", "interleaved"]
chunks = [2]
microbatches = [1]
recompute = ["selective"]
"""


@pytest.fixture
def files(tmp_path):
    for name, text in (("cluster", CLUSTER), ("job", JOB), ("search", SEARCH)):
        (tmp_path / f"{name}.toml").write_text(text)
    return tmp_path


def options(files, *more):
    return ["plan", "search", "--cluster", files / "cluster.toml", "--job", files / "job.toml", "--search",
            files / "search.toml", *more]


def test_list_names_ready_files(semel):
    listed = json.loads(semel("plan", "list", "--json").stdout)
    assert "llama3-405b" in [each["name"] for each in listed["jobs"]]
    assert "selene" in [each["name"] for each in listed["clusters"]] and listed["devices"]
    assert "llama3-405b" in semel("plan", "list").stdout


def test_search_as_json_with_all_its_files(semel, files):
    result = semel(*options(files, "--json", "--html", files / "plan.html", "--trace", files / "t.json", "--emit",
                            "torchtitan", "--out",
                            files / "launch"))
    assert result.exit_code == 0, (result.stderr, result.exception)
    found = json.loads(result.stdout)
    best = found["plans"][0]
    assert best["seconds"] > 0 and 0 < best["mfu"] < 1 and best["memory"] and best["devices"] == 8
    assert best["seconds"] <= min(plan["seconds"] for plan in found["baselines"].values() if plan)
    assert found["gap"] == 0 and found["complete"] and found["words"]
    assert {path.split("/")[-1] for path in found["files"]} >= {"plan.html", "run.sh", "t.json", "device_mesh.json"}
    assert json.loads((files / "t.json").read_text())["traceEvents"]
    assert "<canvas" in (files / "plan.html").read_text()


def test_search_for_people_says_why(semel, files):
    result = semel(*options(files, "--no-compare"))
    assert result.exit_code == 0, (result.stderr, result.exception)
    for words in ("MFU", "exposed communication", "Best: ", "What binds: ", "The search is exact"):
        assert words in result.stdout


def test_what_if_compares_two_clusters(semel, files):
    (files / "far.toml").write_text(CLUSTER.replace("oversubscription = 2", "oversubscription = 16"))
    result = semel("plan", "what-if", "--cluster", files / "cluster.toml", "--job", files / "job.toml", "--to-cluster",
                   files / "far.toml", "--search", files / "search.toml", "--json")
    found = json.loads(result.stdout)
    assert found["after"]["seconds"] <= found["kept"]["seconds"] and found["words"]


def test_validate_prints_each_row(semel):
    found = json.loads(semel("plan", "validate", "selene", "--json").stdout)
    assert len(found["rows"]) >= 8 and all(row["predicted"] > 0 and row["source"] for row in found["rows"])
    assert all(row["memory"] > 0 for row in found["rows"]) and found["devices"][0]["plain_mean"] > 0
    text = semel("plan", "validate", "selene").stdout
    assert "mean error" in text and "unfitted" in text
    text = semel("plan", "validate", "llama3-meta").stdout
    assert "ran, but would be refused: over by" in text and "shown only: whether 380 TFLOP/s" in text


def test_calibrate_writes_a_device_that_loads(semel, files):
    rows = ["kind,m,n,k,seconds", "matmul,4096,4096,4096,0.0002", "matmul,1024,1024,1024,0.00001"]
    (files / "measured.csv").write_text("\n".join(rows) + "\n")
    result = semel("plan", "calibrate", files / "measured.csv", "--device", "h100", "--out", files / "mine.toml")
    assert result.exit_code == 0, (result.stderr, result.exception)
    from semel.planning.load import load_device

    assert load_device(files / "mine.toml").name == "h100"


def test_calibrate_gives_a_level_what_its_messages_reach(semel, refused, files):
    from semel.planning import load_cluster

    sizes = [2.0**power for power in range(16, 31)]  # of 4 ranks over 50 Gbit/s, with 100 us a collective
    rows = ["kind,bytes,ranks,seconds", *(f"collective,{size},4,{1.5 * size / 6.25e9 + 1e-4}" for size in sizes)]
    table = files / "links.csv"
    table.write_text("\n".join(rows) + "\n")
    line = semel("plan", "calibrate", table, "--link", "50 Gbit/s").stdout
    assert line.startswith("messages = ") and line.count("\n") == 1
    cluster = CLUSTER.replace('bandwidth = "50 Gbit/s"', f'bandwidth = "50 Gbit/s"\n{line}', 1)
    (files / "cluster.toml").write_text(cluster)
    level = next(one for one in load_cluster(files / "cluster.toml").levels if one.bandwidth == 6.25e9)
    for size in sizes:
        assert level.messages(size) == pytest.approx(1 / (1 + 1e-4 / (1.5 * size / 6.25e9)), rel=0.01)
    assert "--device, to fit" in refused("plan", "calibrate", table)
    assert "--device, to fit" in refused("plan", "calibrate", table, "--device", "h100", "--link", "50 Gbit/s")
    assert "no unit" in refused("plan", "calibrate", table, "--link", "50")
    assert "must be above 0" in refused("plan", "calibrate", table, "--link", "0 Gbit/s")
    assert "times as fast as a link of" in refused("plan", "calibrate", table, "--link", "5 Gbit/s")
    table.write_text("kind,bytes,ranks,seconds\ncollective,1000,1,0.1\n")
    assert "sends nothing" in refused("plan", "calibrate", table, "--link", "50 Gbit/s")
    table.write_text("kind,m,n,k,seconds\nmatmul,8,8,8,0.1\n")
    assert "no collectives" in refused("plan", "calibrate", table, "--link", "50 Gbit/s")


@pytest.mark.parametrize(("old", "new", "hint"), [
    ('bandwidth = "50 Gbit/s"', "bandwidth = 50", "no unit"), ('"50 Gbit/s"', '"50 Gbits"', "unknown unit"),
    ("oversubscription", "oversubscribtion", "did you mean 'oversubscription'"),
    ('memory = "3 GB"', 'memory = "200 MB"', "fits nowhere"), ("count = 2", "count = two", "line"),
    ("count = 4", "count = 11", "no layout divides"),
])
def test_clusters_that_do_not_fit_are_refused(refused, files, old, new, hint):
    (files / "cluster.toml").write_text(CLUSTER.replace(old, new, 1))
    assert hint in refused(*options(files))


@pytest.mark.parametrize(("name", "old", "new", "hint"), [
    ("job", "layers", "layer", "layers"), ("job", "heads = 8", "heads = 7", "7"),
    ("search", "axes", "axis", "did you mean 'axes'"), ("search", "1f1b", "1f1", "1f1b"),
])
def test_jobs_and_searches_that_do_not_fit_are_refused(refused, files, name, old, new, hint):
    path = files / f"{name}.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    assert hint in refused(*options(files))


def test_names_that_are_not_there_are_refused(refused, files):
    assert "llama3-405b" in refused("plan", "search", "--cluster", "selene", "--job", "lama3-405b")
    assert "no such file" in refused("plan", "search", "--cluster", files / "gone.toml", "--job", "llama3-8b")
    assert "no folder" in refused(*options(files, "--html", files / "gone" / "plan.html"))
    assert "torchtitan, megatron" in refused(*options(files, "--emit", "alpa"))
    assert "recommender" in refused(*options(files, "--emit", "torchrec", "--out", files / "out"))
    assert "nothing differs" in refused("plan", "what-if", "--cluster", "selene", "--job", "llama3-8b")
    assert "gone.csv" in refused("plan", "calibrate", files / "gone.csv", "--device", "h100")
