"""``semel loop``: what it refuses, shows and reports. A whole one runs in tests/loop/test_live_loop.py."""

import json
import re

import pytest
from rich.console import Console

from semel.cli.loop.closing import gaps, read_samples
from semel.cli.loop.dashboard import Dashboard, clock, line, spark
from semel.cli.report.loop import page_of, thin
from semel.cli.report.page import render
from semel.loop import LoopConfig, LoopFolder


def sample(second=0.0, **changes):
    process = {"up": True, "restarts": 1, "hangs": 0, "pid": 5, "seconds": 62.0, "rss_mb": 240.0 + second}
    return {
        "time": 1000.0 + second, "elapsed_s": second, "requests": 1234, "requests_per_s": 20.0, "p50_ms": 12.0,
        "p99_ms": 34.0, "behind_s": 0.0, "coverage": 1.0, "stale_reads": 0, "failed": {}, "duplicates": {},
        "served_ne": 0.9, "best_ne": 0.75, "gap": 0.15, "prequential_ne": 0.89, "prequential_ne_all": 0.91,
        "skew": 0.002, "trained_rows": 10, "trained_steps": 3, "samples_per_s": 5.0, "event_visible_p99_ms": 30.0,
        "item_shown_p50_s": 0.4, "item_shown_p99_s": 1.2, "items_shown": 7, "items_unseen": 0, "events_waiting": 3,
        "outcomes_waiting": 17, "windows_open": 300, "files_waiting": 1, "rows": 900, "outcomes": {"used": 8},
        "watermark_age_s": 17.0, "model_version": "site_rank-abc", "finished": False, "server": {},
        "processes": {name: dict(process) for name in ("server", "joiner", "trainer", "driver")}, **changes}


VERIFIED = {
    "events": 100, "outcomes": 200, "items": 5, "events_lost": 0, "outcomes_lost": 0, "items_lost": 0,
    "events_repeated": 0, "outcomes_repeated": 0, "answers": 50, "answers_not_logged": 1, "coverage": 1.0,
    "good": True,
    "replayed": {"requests": 49, "histories_equal": 49, "bit_equal": 49, "max_difference": 0.0, "candidates": 784},
    "growth": {"server": {"before_mb": 250.0, "after_mb": 251.0, "mb_per_minute": 0.1, "seconds": 600.0,
                          "steady": 1.0}}}


def test_refusals(refused, tmp_path):
    there = ["--dir", tmp_path / "loop"]
    assert "one of them" in refused("loop", *there)
    assert "one of them" in refused("loop", "site_rank", "--simulate", "--data", "ml-1m", *there)
    assert "name a recipe" in refused("loop", "--data", "ml-100k", *there)
    assert "no recipe 'nothing'" in refused("loop", "nothing", "--simulate", *there)
    assert "predicts the next item" in refused("loop", "movies_next", "--simulate", *there)
    assert "rate" in refused("loop", "--simulate", "--rate", "0", *there)
    assert "speedup" in refused("loop", "--simulate", "--speedup", "nan", *there)
    assert "chaos" in refused("loop", "--simulate", "--chaos", "0", *there)
    assert "duration" in refused("loop", "--simulate", "--duration", "-1", *there)
    assert "--port" in refused("loop", "--simulate", "--port", "70000", *there)
    assert "nonsense" in refused("loop", "--simulate", "--set", "nonsense=1", *there)
    assert "FIELD=VALUE" in refused("loop", "--simulate", "--set", "nonsense", *there)
    assert "folders only" in refused("loop", "--simulate", "--dir", "s3://bucket/loop")
    assert not (tmp_path / "loop" / "store").exists()


def test_a_folder_that_is_something_else(refused, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "holds no loop" in refused("loop", "--simulate", "--dir", tmp_path)
    assert "holds no loop" in refused("loop", "--simulate", "--dir", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_data_that_cannot_be_read_leave_nothing(refused, tmp_path, small_data):
    there = ["--dir", tmp_path / "loop"]
    refused("loop", "movies_rank", "--data", tmp_path / "nowhere", *there)
    assert "request features" in refused("loop", "ml1m_rank", "--data", small_data, *there)
    assert "'click'" in refused("loop", "site_rank", "--data", small_data, *there)
    assert not (tmp_path / "loop").exists()


def test_a_loop_goes_on_as_it_was(refused, tmp_path):
    LoopFolder(tmp_path / "loop").settle(LoopConfig())
    message = refused("loop", "--simulate", "--rate", "30", "--dir", tmp_path / "loop")
    assert "rate 20.0, not 30.0" in message and "another --dir" in message
    (tmp_path / "loop" / "loop.json").write_text("{")
    assert "damaged" in refused("loop", "--simulate", "--dir", tmp_path / "loop")


def test_two_loops_in_one_folder(refused, tmp_path):
    import fcntl

    LoopFolder(tmp_path / "loop").settle(LoopConfig())
    with (tmp_path / "loop" / "loop.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert "runs there already" in refused("loop", "--simulate", "--dir", tmp_path / "loop")


def test_the_dashboard_shows_the_figures_on_a_terminal_and_lines_elsewhere():
    wide = Console(record=True, width=110, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with Dashboard(wide, LoopConfig()) as dashboard:
        for second in range(4):
            dashboard(sample(float(second), gap=0.2 - 0.01 * second))
        dashboard.say("killing server (5)")
        wide.print(dashboard.render(sample(3.0)))
    text = wide.export_text()
    for words in ("1,234", "0.9000", "0.7500", "server", "1:02", "killing server", "gap to the best NE",
                  "site_rank-abc"):
        assert words in text, words
    plain = Console(record=True, width=200, force_terminal=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with Dashboard(plain, LoopConfig()) as dashboard:
        dashboard(sample(1.0))
        dashboard(sample(2.0))
    assert plain.export_text().count("1,234 requests") == 1  # not more often than every ten seconds


def test_figures_that_are_not_there_yet_are_dashes():
    unknown = dict.fromkeys(("p50_ms", "p99_ms", "served_ne", "best_ne", "gap", "prequential_ne", "skew", "coverage",
                             "item_shown_p50_s", "item_shown_p99_s", "event_visible_p99_ms", "requests_per_s",
                             "behind_s"))
    down = {"server": {"up": False, "restarts": 0, "hangs": 0, "pid": None, "seconds": 0.0, "rss_mb": None}}
    console = Console(record=True, width=110, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(Dashboard(console, LoopConfig()).render(sample(**unknown, processes=down)))
    text = console.export_text()
    assert "–" in text and "down" in text
    assert "down: server" in line(sample(**unknown, processes=down))


def test_small_things():
    assert clock(62) == "1:02" and clock(3723) == "1:02:03"
    assert spark([1.0, 2.0, 3.0], 3) == "▁▄█" or spark([1.0, 2.0, 3.0], 3) == "▁▅█"
    assert spark([1.0, 1.0], 9) == "▁▁"
    many = [sample(float(second)) for second in range(1000)]
    assert len(thin(many)) == 360 and thin(many)[0] is many[0] and thin(many)[-1] is many[-1]


def test_gaps_are_means_of_stretches():
    samples = [sample(float(second), gap=None if second < 2 else 1.0 - second / 10) for second in range(10)]
    found = gaps(samples, points=4)
    assert [time for time, _ in found] == [2.5, 4.5, 6.5, 8.5]
    assert [gap for _, gap in found] == pytest.approx([0.75, 0.55, 0.35, 0.15])
    assert gaps([sample(gap=None)]) == []


def test_the_report_shows_what_was_measured(tmp_path):
    (tmp_path / "samples.jsonl").write_text(json.dumps(sample(0.0)) + "\n" + json.dumps(sample(60.0)) + '\n{"time": 3')
    samples = read_samples(tmp_path / "samples.jsonl")
    assert len(samples) == 2
    facts = {**samples[-1], "kills": [{"process": "server", "back_s": 7.25}], "verification": VERIFIED}
    page = page_of(LoopConfig(), samples, facts)
    titles = [section.title for section in page.sections]
    assert titles == ["Quality", "Requests", "Freshness", "What waits", "Processes", "Verification"]
    assert ["server", "1", "7.2"] in page.sections[4].grid.rows
    html = render(page)
    assert "1.0 minutes of a simulated site" in html and re.search(r"histories equal, by checksum.*?49", html, re.S)
    without = page_of(LoopConfig(data="ml-1m"), samples, {**facts, "verification": None, "best_ne": None})
    assert len(without.sections) == 5
