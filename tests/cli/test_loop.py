"""Every verb of the path on real data, in the order of the path: each prints one JSON document and nothing else."""

import json
from pathlib import Path

import pytest

from semel.cli.demo.server import serving


def test_ingest_counts_what_it_stored(trained, small_data):
    facts = json.loads(trained.ingested)
    rows = len((small_data / "ratings.csv").read_text().splitlines()) - 1
    assert facts["events"] == rows and facts["users"] == 40
    assert facts["events_per_second"] > 0 and facts["bytes"] > 0


def test_ingest_names_source_and_terms(semel, small_data, tmp_path):
    result = semel("ingest", small_data, "--store", tmp_path / "store")
    assert result.exit_code == 0
    assert "GroupLens" in result.stderr and str(small_data) in result.stderr
    assert "events of 40 users" in result.stdout


def test_ingest_does_not_overwrite(refused, trained, small_data):
    assert "already" in refused("ingest", small_data, "--store", trained.store)


def test_train_says_where_the_run_is_and_how_it_went(trained):
    facts = json.loads(trained.trained)
    assert Path(facts["run"]) == trained.run
    assert facts["epochs"] == 2 and 0 < facts["validation"]["auc"] < 1


def test_train_resumes(semel, trained, tmp_path):
    result = semel("train", "--resume", trained.run, "--set", "epochs=2", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == json.loads(trained.trained)["steps"]


def test_evaluate_writes_and_prints_the_same(semel, trained):
    result = semel("evaluate", trained.run, "--ranking-requests", 3, "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((trained.run / "evaluation.json").read_text())
    assert printed["tasks"]["like"]["ne"]["value"] > 0


def test_evaluate_shows_intervals(semel, trained):
    result = semel("evaluate", trained.run, "--ranking-requests", 0, "--split", "validation")
    assert result.exit_code == 0
    assert "NE" in result.stdout and " to " in result.stdout and "200 or more" in result.stdout


def test_compact_moves_what_is_in_the_log(semel, trained):
    result = semel("compact", trained.store, "--json")
    assert json.loads(result.stdout)["events"]["events"]["log"] == 0
    assert "generation" in semel("compact", trained.store).stdout


@pytest.mark.timeout(180)
def test_serve_then_replay_is_exact(semel, refused, trained, tmp_path):
    from semel import Client

    with serving(trained.run, trained.store, tmp_path / "server.log") as url, Client(url) as client:
        ranked = client.rank(1, [1, 2, 3, 50])
        assert {item.item_id for item in ranked.results} == {1, 2, 3, 50}
        client.outcomes([{"request_id": ranked.request_id, "item_id": 1, "label": {"like": 1.0}}])
        client.rank(10**9, [1, 10**9])  # nobody has heard of either
    result = semel("replay", trained.run, "--store", trained.store, "--json")
    assert result.exit_code == 0, (result.stdout, result.stderr)
    report = json.loads(result.stdout)
    assert report["requests"] == report["histories_equal"] == 2
    assert report["max_difference"] == 0.0
    shown = semel("replay", trained.run, "--store", trained.store)
    assert "histories_equal" in shown.stdout and "2 of 2" in shown.stdout
    said = refused("replay", trained.run, "--store", trained.store, "--memory", tmp_path / "rows")
    assert "has no item memory" in said


@pytest.mark.timeout(180)
def test_serve_refuses_a_public_address_without_a_token(refused, trained):
    assert "--token" in refused("serve", trained.run, "--store", trained.store, "--host", "0.0.0.0")


def test_report_is_one_page(semel, trained, tmp_path):
    result = semel("report", trained.run, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.stderr
    page = (tmp_path / "page.html").read_text()
    assert "A run of movies_rank" in page and "Learning" in page and "Histories" in page
