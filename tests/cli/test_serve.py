"""``semel serve``: its options reach the server. The server itself is tested where it is."""

from pathlib import Path

import pytest
from serving.stand_ins import make_store, save_tiny_model

from semel import serving
from semel.serving.options import ServerOptions


@pytest.mark.parametrize(("options", "share", "state_bytes"), [
    ([], True, 256 << 20), (["--no-share"], False, 256 << 20), (["--state-cache", "3"], True, 3 << 20)])
def test_sharing_is_the_default_and_can_be_turned_off(semel, monkeypatch, options, share, state_bytes):
    given = {}
    monkeypatch.setattr(serving, "run_server", lambda *_, **named: given.update(named))
    result = semel("serve", Path("run"), *options)
    assert result.exit_code == 0, result.stderr
    assert given["share"] is share and given["state_bytes"] == state_bytes


def test_options_reach_the_server_in_its_units(semel, monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(serving, "run_server", lambda *_, **named: given.update(named))
    (tmp_path / "token").write_text("s3cret-token\n")
    result = semel("serve", Path("run"), "--latency-target", "250", "--workers", "3", "--scorers", "2",
                   "--token-file", tmp_path / "token", "--log-level", "info")
    assert result.exit_code == 0, result.stderr
    assert (given["latency_target"], given["workers"], given["scorers"]) == (0.25, 3, 2)
    assert given["token"] == "s3cret-token" and given["log_level"] == "info"
    ServerOptions("run", "store", **{name: value for name, value in given.items() if name not in ("workers", "ready")})


@pytest.mark.parametrize(("options", "message"), [
    (["--latency-target", "0"], "--latency-target must be above 0"), (["--log-level", "loud"], "--log-level must be"),
    (["--token", "12345678", "--token-file", "x"], "not both"), (["--token-file", "nowhere"], "nowhere"),
    (["--otlp", "here"], "--otlp must be the URL")])
def test_what_no_server_can_start_with_is_one_line(refused, tmp_path, options, message):
    assert message in refused("serve", tmp_path / "run", "--store", tmp_path, *options)


@pytest.mark.parametrize("url", ["kafka://x/y", "nowhere"])
def test_a_memory_for_a_model_that_has_none_is_one_line(refused, tmp_path, url):
    for store in make_store(tmp_path / "store"):
        store.close()
    save_tiny_model(tmp_path / "run")
    line = refused("serve", tmp_path / "run", "--store", tmp_path / "store", "--port", "0", "--memory", url)
    assert f"memory {url}: model tiny-" in line and "has no item memory" in line and "leave it out" in line
