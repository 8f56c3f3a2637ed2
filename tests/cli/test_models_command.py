"""``semel models`` and ``semel rollback``, of a server and of a run; what is wrong is one line."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from serving.live import serving
from serving.stand_ins import make_store, save_tiny_model

from semel.models import current_version


@pytest.fixture
def runs(tmp_path):
    """(folder of runs, versions): run "one" with two versions, run "two" with one."""
    folder = tmp_path / "runs"
    versions = [save_tiny_model(folder / "one", seed=seed) for seed in (0, 1)]
    return folder, [*versions, save_tiny_model(folder / "two", seed=2, kind="dcnv2")]


def test_of_a_run(semel, refused, runs, tmp_path):
    folder, (first, second, _) = runs
    listed = json.loads(semel("models", folder / "one", "--json").stdout)
    assert listed["current"] == second and [one["version"] for one in listed["versions"]] == [first, second]
    assert first in semel("models", folder / "one").stdout
    assert semel("rollback", folder / "one").exit_code == 0 and current_version(folder / "one") == first
    assert "keeps no version before" in refused("rollback", folder / "one")
    assert semel("rollback", folder / "one", "--to", second).exit_code == 0
    assert current_version(folder / "one") == second
    assert "does not keep model" in refused("rollback", folder / "one", "--to", "nothing")
    assert "neither a run" in refused("models", tmp_path / "none")
    assert "neither a run" in refused("rollback", tmp_path)
    assert "is a folder" in refused("models", folder / "one", "--serve", "latest")


@pytest.mark.timeout(120)
def test_of_a_server(semel, refused, runs, tmp_path):
    folder, (first, second, other) = runs
    for handle in make_store(tmp_path / "store"):
        handle.close()
    with serving(folder / "one", tmp_path / "store", tmp_path / "errors", token="s3cret-token") as server:
        token = ["--token", "s3cret-token"]

        def serves(*arguments):
            result = semel(*arguments, *token, "--json")
            assert result.exit_code == 0, result.stderr
            return json.loads(result.stdout)["stages"]["rank"]["current"]["version"]

        assert serves("models", server.url) == second
        assert serves("models", server.url, "--serve", first) == first
        assert serves("models", server.url, "--run", "two") == other
        assert serves("rollback", server.url) == first
        assert serves("rollback", server.url, "--to", other) == other
        table = semel("models", server.url, *token).stdout
        assert all(word in table for word in (first, second, other, "pinned", "dcnv2", "available"))
        assert "no run here keeps" in refused("rollback", server.url, "--to", "nothing", *token)
        assert "has no model of its own" in refused("models", server.url, "--serve", "latest", "--stage", "x", *token)
        assert "token" in refused("models", server.url)
        assert server.stop() == 0
    assert "does not answer" in refused("models", server.url)
    assert "http" in refused("models", "http://")
