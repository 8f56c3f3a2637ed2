"""What ``semel train`` says while it trains where stderr is no terminal."""

import io

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console
from rich.progress import Progress as Bar

from semel import EventSchema, HistoryStore
from semel.cli import output, train
from semel.cli.train import Shown, ShownFollowing
from semel.training import Followed, Progress


def at(step):
    return Progress(step, 4000, step // 1000, 4, 1 / step, 12345.0, 0.0, {}, {})


def followed(step):
    return Followed(step, 100, f"[{step}].parquet", 2, 0.5, 900.0, 0.9, 0.7, 0.8, 0.71, {})


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_the_first_report_is_a_line_and_others_wait_their_turn(capsys, monkeypatch):
    with output.progress_bar() as bar:
        shown = Shown(bar, indent="  ")
        shown(at(20))
        assert lines(capsys) == ["  epoch 1 of 4, step 20 of 4,000: loss 0.0500, 12,345 samples/s"]
        shown(at(40))
        assert lines(capsys) == []
        monkeypatch.setattr(train, "LINE_EVERY_S", 0.0)
        shown(at(2000))
        assert lines(capsys) == ["  epoch 3 of 4, step 2,000 of 4,000: loss 0.0005, 12,345 samples/s"]


def test_a_follower_says_which_file(capsys):
    with output.progress_bar() as bar:
        shown = ShownFollowing(bar)
        shown(followed(7))
        shown(followed(8))
    assert lines(capsys) == ["[7].parquet, step 7: loss 0.5000, NE 0.8000 (so far 0.9000), 900 samples/s, 2 files wait"]


@pytest.mark.parametrize(("kind", "said"), [(Shown, at), (ShownFollowing, followed)])
def test_on_a_terminal_there_is_the_bar_alone(kind, said):
    written = io.StringIO()
    bar = Bar(console=Console(file=written, force_terminal=True), auto_refresh=False)
    kind(bar)(said(20))
    assert written.getvalue() == "" and bar.tasks[0].completed == 20


def test_a_run_that_nothing_validates_is_not_silent(semel, tmp_path):
    user, place = np.divmod(np.arange(400), 20)
    with HistoryStore.create(str(tmp_path / "store"), EventSchema({"item_id": pa.int64()}), shards=1) as store:
        store.append(pa.table({"user_id": user, "event_time": place * 10**9, "item_id": place + user % 3}))
    result = semel("train", "movies_next", "--store", tmp_path / "store", "--out", tmp_path, "--set", "epochs=1",
                   "--set", "examples.validate=false", "--set", "model.encoder.layers=1")
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "epoch 1 of 1, step " in result.stderr and "samples/s" in result.stderr
