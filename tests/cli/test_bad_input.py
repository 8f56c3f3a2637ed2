"""Bad input to each command: one clear line and exit code 2, or it works."""

import json

import pytest

SMALL = ["--set", "model.encoder.layers=1", "--set", "batch=16"]
HEADER = "user_id,item_id,event_time,rating"


def table(tmp_path, lines, header=HEADER, name="events.csv"):
    path = tmp_path / name
    path.write_text("\n".join([header, *lines]) + "\n", encoding="utf8")
    return path


def ingest(semel, path, tmp_path, *options):
    result = semel("ingest", path, "--store", tmp_path / "store", "--json", *options)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return json.loads(result.stdout)


def some_events(users=30, events=12):
    """Ratings a day apart, in the order of time."""
    times = {(user, step): 1_000_000 * (1_600_000_000 + 86_400 * step + user) for step in range(events)
             for user in range(users)}
    return [f"{user},{(7 * user + step) % 40},{time},{1 + (user + step) % 5}" for (user, step), time in times.items()]


# What cannot be read


@pytest.mark.parametrize(("name", "hint"), [
    ("ml-2m", "did you mean"), ("gone.csv", "gone.csv"), ("./nowhere/ml-1m", "no such file"),
])
def test_ingest_of_what_is_not_there(refused, tmp_path, name, hint):
    assert hint in refused("ingest", name, "--store", tmp_path / "store")


def test_ingest_names_the_column_that_is_missing(refused, tmp_path):
    path = table(tmp_path, ["1,2,3"], header="user_id,film,event_time")
    assert "item_id" in refused("ingest", path, "--store", tmp_path / "store")
    assert "filn" in refused("ingest", path, "--item", "filn", "--store", tmp_path / "store")


@pytest.mark.parametrize("text", ["", HEADER + "\n"])
def test_ingest_of_nothing(refused, tmp_path, text):
    path = tmp_path / "empty.csv"
    path.write_text(text)
    refused("ingest", path, "--store", tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_ingest_names_the_line_that_is_wrong(refused, tmp_path):
    path = table(tmp_path, ["1,2,1000000,4", "1,,2000000,4"])
    assert "line 3" in refused("ingest", path, "--store", tmp_path / "store")


def test_ingest_refuses_options_that_contradict(refused, tmp_path):
    assert "columns are known" in refused("ingest", "ml-1m", "--user", "u", "--store", tmp_path / "store")
    path = table(tmp_path, some_events(2, 2))
    assert "unit" in refused("ingest", path, "--time-unit", "years", "--store", tmp_path / "store")
    assert "give one of them" in refused("ingest", path, "--data", path, "--store", tmp_path / "store")


def test_compact_refuses_what_is_no_limit(refused, semel, tmp_path):
    assert semel("ingest", table(tmp_path, some_events(2, 2)), "--store", tmp_path / "store").exit_code == 0
    assert "'much' is not a size" in refused("compact", tmp_path / "store", "--memory-limit", "much")
    assert "workers must be at least 1" in refused("compact", tmp_path / "store", "--workers", 0)
    assert "local, ray" in refused("compact", tmp_path / "store", "--engine", "spark")
    assert "raise memory_limit" in refused("compact", tmp_path / "store", "--memory-limit", 10, "--codec", "plain")
    done = semel("compact", tmp_path / "store", "--memory-limit", "64MiB", "--workers", 1, "--codec", "plain")
    assert done.exit_code == 0 and "generation 2" in done.stdout


@pytest.mark.parametrize("verb", [
    ["train", "movies_rank", "--store", "{gone}"], ["train", "--resume", "{gone}"], ["evaluate", "{gone}"],
    ["serve", "{gone}", "--store", "{gone}"], ["replay", "{gone}", "--store", "{gone}"], ["report", "{gone}"],
    ["compact", "{gone}"], ["demo", "--data", "{gone}"],
])
def test_each_verb_says_what_is_not_there(refused, tmp_path, verb):
    gone = tmp_path / "gone"
    assert "gone" in refused(*(word.format(gone=gone) for word in verb))
    assert not gone.exists()


def test_train_names_the_nearest_recipe_and_field(refused, tmp_path):
    assert "movies_rank" in refused("train", "movies_rnk", "--store", tmp_path)
    assert "epochs" in refused("train", "movies_rank", "--store", tmp_path, "--set", "epoch=3")
    assert "FIELD=VALUE" in refused("train", "movies_rank", "--store", tmp_path, "--set", "epochs")
    assert "name a recipe" in refused("train", "--store", tmp_path)
    file = tmp_path / "bad.toml"
    file.write_text("epochs = = 3")
    assert "bad.toml" in refused("train", "movies_rank", "--store", tmp_path, "--config", file)


def test_replay_of_nothing_served(refused, trained, tmp_path, semel, small_data):
    store = tmp_path / "store"
    assert semel("ingest", small_data, "--store", store).exit_code == 0
    assert "exposures" in refused("replay", trained.run, "--store", store)


def test_report_before_a_folder_is_there(refused, trained, tmp_path):
    assert "no folder" in refused("report", trained.run, "--out", tmp_path / "a" / "b.html")


def test_demo_never_removes_what_it_did_not_make(refused, tmp_path):
    (tmp_path / "mine.txt").write_text("precious")
    assert "--dir" in refused("demo", "--quick", "--dir", tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"


# What is odd, and works


def test_one_event_is_stored_and_training_on_it_is_refused(semel, refused, tmp_path):
    facts = ingest(semel, table(tmp_path, ["1,2,1000000,4"]), tmp_path)
    assert (facts["events"], facts["users"], facts["items"]) == (1, 1, 1)
    refused("train", "movies_next", "--store", tmp_path / "store", "--out", tmp_path / "runs")


def test_other_names_and_units(semel, tmp_path):
    path = table(tmp_path, ["a,x,1600000000", "b,y,1600000001"], header="who,what,when")
    facts = ingest(semel, path, tmp_path, "--user", "who", "--item", "what", "--time", "when", "--time-unit", "s")
    assert facts["users"] == 2


def test_times_out_of_order_and_rows_twice_are_events(semel, tmp_path):
    lines = ["1,2,3000000,4", "1,3,1000000,5", "1,2,3000000,4", "1,2,3000000,4"]
    assert ingest(semel, table(tmp_path, lines), tmp_path)["events"] == 4


def test_a_history_of_65536_events(semel, tmp_path):
    lines = [f"1,{step % 997},{1_000_000 * step},{step % 5 + 1}" for step in range(65_536)]
    facts = ingest(semel, table(tmp_path, lines), tmp_path)
    assert facts["events"] == 65_536 and facts["users"] == 1


@pytest.mark.timeout(180)
def test_ids_that_are_not_ascii_go_all_the_way(semel, tmp_path):
    fields = [line.split(",") for line in some_events()]
    lines = [f"ü{user},映画{item},{time},{rating}" for user, item, time, rating in fields]
    ingest(semel, table(tmp_path, lines), tmp_path)
    result = semel("train", "movies_next", "--store", tmp_path / "store", "--out", tmp_path / "runs", *SMALL,
                   "--set", "epochs=1", "--json")
    assert result.exit_code == 0, (result.stderr, result.exception)
    judged = semel("evaluate", json.loads(result.stdout)["run"], "--json")
    assert judged.exit_code == 0, (judged.stderr, judged.exception)
    assert json.loads(judged.stdout)["requests"] == 30
