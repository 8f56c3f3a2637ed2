"""A recipe trained by Ray Train (extra ``ray``): Ray places and starts the workers, the trainer is the same.

    from semel import recipes
    from semel.training.ray_train import fit

    run = fit(recipes.get("movies_rank"), workers=4)          # on the cluster that ray.init() found

Each worker is a rank, as a process of ``semel train --nproc`` or of torchrun: the same batches, pieces and sums, so the
same losses. Every node must see the store and the folder of runs under the same paths. Checkpoints are Semel's own, in
the run's folder: resume a run with ``resume=``, with any number of workers, on Ray or off it.
"""

from __future__ import annotations

import dataclasses
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semel.training.recipe import Recipe
from semel.training.run import Run
from semel.training.tuning import FIT, GIVEN, check_costs


def fit(recipe: Recipe, workers: int, *, resume: str | Path | None = None, resources: Mapping[str, float] | None = None,
        storage: str | Path | None = None) -> Run:
    """Train ``recipe`` with so many workers of the running Ray cluster (without one, Ray starts one on this machine).

    ``resources``: of each worker, {"CPU": 1} if not given. ``storage``: where Ray keeps what it notes about the job, a
    folder or address that all nodes reach; a temporary folder if not given, which will do for workers on this machine.
    Raises ModuleNotFoundError without Ray; ValueError for no workers; FileNotFoundError or ValueError for a run or
    costs that are not there; RuntimeError, with what the first worker raised, where training failed.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    try:
        from ray.train import RunConfig, ScalingConfig
        from ray.train.torch import TorchConfig, TorchTrainer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"Ray Train is not installed ({error}); pip install 'semel[ray]'") from error
    from semel.comm.processes import TIMEOUT_S

    if resume is not None:
        Run.open(resume)
    recipe = _absolute(recipe)
    check_costs(recipe)
    Path(recipe.out).mkdir(parents=True, exist_ok=True)
    answer = Path(recipe.out) / f".ray-{uuid.uuid4().hex}"  # rank 0 says there which run it made
    job = {"recipe": recipe.to_json(), "resume": None if resume is None else str(Path(resume).absolute()),
           "answer": str(answer)}
    with tempfile.TemporaryDirectory(prefix="semel-ray-") as folder:
        try:
            result = TorchTrainer(
                _worker, train_loop_config=job, torch_config=TorchConfig(backend="gloo", timeout_s=int(TIMEOUT_S)),
                scaling_config=ScalingConfig(num_workers=workers, resources_per_worker=dict(resources or {"CPU": 1})),
                run_config=RunConfig(name=recipe.name, storage_path=str(storage or folder))).fit()
            if result.error is not None:
                raise result.error
            return Run.open(answer.read_text())
        except Exception as error:
            failures = getattr(error, "worker_failures", None) or {0: error}
            rank, first = min(failures.items())
            raise RuntimeError(f"Ray Train failed (rank {rank}): {str(first).strip().splitlines()[-1]}") from error
        finally:
            answer.unlink(missing_ok=True)


def _worker(job: dict[str, Any]) -> None:
    from semel.comm.processes import join
    from semel.training.trainer import Trainer

    world = join()
    run = Trainer(Recipe.from_json(job["recipe"])).fit(job["resume"])
    if world.rank == 0:
        Path(job["answer"]).write_text(str(run.path))


def _absolute(recipe: Recipe) -> Recipe:
    """Workers have a working directory of their own."""
    paths = {name: str(Path(getattr(recipe, name)).absolute()) for name in ("store", "out")
             if "://" not in getattr(recipe, name)}
    if recipe.costs not in (GIVEN, FIT):
        paths["costs"] = str(Path(recipe.costs).absolute())
    return dataclasses.replace(recipe, **paths)  # type: ignore[arg-type]
