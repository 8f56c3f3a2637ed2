"""Ray Train's workers give the losses of ``--nproc``: the same ranks, started by another."""

import os
import sys
from pathlib import Path

import pytest
from small import make_recipe, make_store

from semel.comm.processes import spawn
from semel.models import load_model
from semel.training import Run, Trainer
from semel.training.ray_train import fit

pytestmark = pytest.mark.timeout(600)


def train(store, out):
    return str(Trainer(make_recipe(store, out)).fit().path)


def curve(run):
    return [(line["kind"], line["step"], line.get("loss")) for line in run.metrics if line["kind"] != "balance"]


@pytest.mark.slow
def test_workers_of_ray_give_the_bits_of_processes(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.train.torch")
    store = make_store(tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    here = str(Path(__file__).parents[2])
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False,
             runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}})
    try:
        together = fit(make_recipe("store", "ray"), workers=2)
        with pytest.raises(RuntimeError, match=r"Ray Train failed \(rank 0\).*no_such"):
            fit(make_recipe(str(tmp_path / "no_such"), tmp_path / "ray"), workers=2)
    finally:
        ray.shutdown()
    processes = Run.open(spawn(train, 2, store, tmp_path / "processes")[0])
    assert together.summary["ranks"] == 2 and curve(together) == curve(processes)
    assert load_model(together.path).version == load_model(processes.path).version
    assert [path.name for path in (tmp_path / "ray").iterdir()] == [together.path.name]


def test_what_cannot_be_trained_is_refused_before_anything_starts(tmp_path, monkeypatch):
    recipe = make_recipe(str(tmp_path), tmp_path / "out")
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        fit(recipe, workers=0)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'semel\[ray\]'"):
        fit(recipe, workers=2)
    assert not (tmp_path / "out").exists()
