"""Baselines, sensitivity, options, the page, and launch files."""

import csv
import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semel.planning import Layout, baselines, load_cluster, load_job
from semel.planning.emit import emit, megatron, torchtitan
from semel.planning.emit.mesh import devices_of_ranks
from semel.planning.explain import explain, what_if
from semel.planning.options import Options, load_search
from semel.planning.plan import measured
from semel.planning.sensitivity import choices, family, flips, gains, turns

DEVICE = {"name": "small", "memory": "3 GB", "memory_bandwidth": "1 TB/s", "matmul": 0.5, "attention": 0.4,
          "vector": {"value": 0.8, "assumed": "typical"}, "kernel": "2 us", "reserved": "0 B", "power": "500 W",
          "price": "2 $/h", "peak": {"bf16": "100 Tflop/s"}}
QUICK = Options(schedules=("1f1b", "interleaved", "zb_v"), chunks=(1, 2), microbatches=(1,), recompute=("selective",),
                axes=("tp", "pp", "dp"), nodes=600, simulations=40)


def cluster(over=2.0, distance="10 km", outer="50 Gbit/s"):
    return load_cluster({
        "name": "two buildings", "device": DEVICE, "levels": [
            {"name": "host", "count": 4, "bandwidth": "100 GB/s", "latency": "1 us", "domain": True},
            {"name": "building", "count": 2, "bandwidth": {"value": outer, "assumed": "leased"}, "latency": "20 us",
             "oversubscription": over, "distance": distance, "technologies": [
                 {"name": "hashed", "routing": "ecmp", "paths": 8, "queue_pairs": 16},
                 {"name": "sprayed", "routing": "spraying", "efficiency": {"value": 0.95, "assumed": "hope"}}]}]})


def job(**changed):
    return load_job({"kind": "transformer", "name": "tiny", "layers": 8, "width": 1024, "feedforward": 4096, "heads": 8,
                     "vocabulary": 8000, "sequence": 1024, "batch": 16, **changed})


@pytest.fixture(scope="module")
def found():
    return explain(cluster(), job(), QUICK, flip_map=True)


# Baselines


def test_the_joint_search_is_never_worse(found):
    best = found.plans[0].seconds
    assert set(found.baselines) == {each.name for each in baselines.BASELINES}
    for plan in found.baselines.values():
        assert plan is not None and best <= plan.seconds * (1 + 1e-12)
        assert plan.seconds <= found.baselines["production"].seconds * (1 + 1e-12) or plan.name in (
            "CrossPipe-like", "Sailor-like")


def test_production_follows_its_rule(found):
    layout = found.baselines["production"].layout
    assert layout.size("tp") == 4  # fills the host
    assert family(cluster(), layout) in ("dp", "nothing", "pp") and layout.network["building"] == "hashed"
    assert layout.schedule in ("interleaved", "1f1b")


def test_optimizers_of_one_dimension_change_only_theirs(found):
    usual, plans = found.baselines["production"].layout, found.baselines
    assert plans["network only"].layout.sizes == usual.sizes and plans["network only"].layout.order == usual.order
    assert plans["schedule only"].layout.network == usual.network
    assert {axis: size for axis, size in plans["schedule only"].layout.sizes.items() if size > 1} == dict(usual.sizes)
    assert plans["placement only"].layout.network == usual.network


def test_an_unknown_baseline_names_all():
    with pytest.raises(ValueError, match="Sailor-like"):
        baselines.run("Alpa", cluster(), job(), QUICK)


# Sensitivity


def test_ten_percent_more_never_hurts_and_is_what_a_simulation_says(found):
    plan = found.plans[0]
    for gain in gains(plan):
        assert -1e-9 <= gain.share < 0.1
    speed = next(gain for gain in gains(plan) if gain.path.endswith(".peak"))
    faster = plan.cluster.change("devices.small.peak", {"bf16": 110e12})
    assert speed.share == pytest.approx(1 - measured(faster, plan.job, plan.layout).seconds / plan.seconds)


def test_no_single_choice_beats_the_winner(found):
    assert found.outcome.complete
    assert choices(found.plans[0], QUICK) and all(choice.loss >= -1e-9 for choice in choices(found.plans[0], QUICK))


def test_a_conclusion_that_hangs_on_a_guess_is_flagged():
    near, far = (measured(cluster(), job(), Layout({"tp": 4, axis: 2}, order=("tp", axis), network={"building": net},
                                                   recompute="selective"))
                 for axis, net in (("dp", "sprayed"), ("dp", "hashed")))
    better, worse = sorted((near, far), key=lambda plan: plan.seconds)
    flagged, tried = flips(better, [worse])
    assert tried > 0
    for flip in flagged:
        assert flip.path in cluster().assumed and flip.seconds[1] < flip.seconds[0] and flip.factor in (0.7, 1.3)
    assert any("efficiency" in flip.path for flip in flagged)  # 0.7 of 0.95 is below what hashing leaves


def test_where_another_placement_wins_it_does():
    pool = [measured(cluster(outer="400 Gbit/s", over=1.0, distance="0 m"), job(), Layout(sizes, order=order,
                     recompute="selective")) for sizes, order in (
        ({"tp": 4, "dp": 2}, ("tp", "dp")), ({"tp": 4, "pp": 2}, ("tp", "pp")))]
    pool.sort(key=lambda plan: plan.seconds)
    for turn in turns(pool):
        assert turn.factor > 0 and turn.to != family(pool[0].cluster, pool[0].layout)


def test_what_if_starts_from_the_other_plan():
    compared = what_if(cluster(), job(), cluster(over=8.0, distance="500 km"), job(), QUICK)
    assert compared.after.seconds <= compared.kept.seconds * (1 + 1e-12)
    assert compared.before.seconds <= compared.after.seconds * (1 + 1e-12) and len(compared.words) >= 3


# Options


@pytest.mark.parametrize(("document", "hint"), [
    ({"axis": ["tp"]}, "did you mean 'axes'"), ({"axes": ["tp", "ddp"]}, "did you mean 'dp'"),
    ({"schedules": ["1f1"]}, "1f1b"), ({"objective": "speed"}, "time, cost, energy"),
    ({"limits": {"step_time": 4}}, "no unit"), ({"limits": {"nodes": 0}}, "at least 1"), ({"schedules": []},
                                                                                          "is empty"),
    ({"pinned": {"tp": "8"}}, "whole number"), ({"limits": {"memory": 1.5}}, "1"), ({"pinned": {"tpp": 8}}, "tp"),
])
def test_options_that_do_not_fit_are_refused(document, hint):
    with pytest.raises(ValueError, match=hint):
        load_search(document)


def test_options_from_a_file(tmp_path):
    path = tmp_path / "search.toml"
    path.write_text('axes = ["tp", "dp"]\nobjective = "cost"\n[limits]\nstep_time = "2 s"\nnodes = 10\n'
                    '[pinned]\ntp = 2\n[pinned.network]\nbuilding = "sprayed"\n')
    options = load_search(path)
    assert (options.name, options.axes, options.objective, options.seconds, options.nodes) == (
        "search", ("tp", "dp"), "cost", 2.0, 10)
    assert options.pinned == {"tp": 2, "network": {"building": "sprayed"}}


def test_pins_that_contradict_the_cluster_are_refused():
    from semel.planning.explorer import search

    with pytest.raises(ValueError, match="hashed, sprayed"):
        search(cluster(), job(), replace(QUICK, pinned={"network": {"building": "smoke"}}))


# The page


def test_the_page_is_self_contained_and_holds_what_was_found(found, tmp_path):
    from semel.planning.report import write_report

    text = write_report(found, tmp_path / "plan.html").read_text()
    assert not re.search(r"<(script|link|img|iframe)[^>]*(src|href)=", text)
    for title in ("Why this plan", "Timeline", "Memory and links", "Trade-offs", "What binds", "Where it flips"):
        assert f"<h2>{title}</h2>" in text
    drawn = json.loads(re.search(r"const TIMELINES = (.*);", text)[1])
    winner = found.plans[0].trace()
    assert drawn[0]["seconds"] == pytest.approx(winner.seconds, rel=1e-6)
    lanes = [lane for lane in drawn[0]["lanes"] if not lane["thin"]]
    assert sum(len(lane["ops"]) for lane in lanes) == len(winner.op_start)
    with pytest.raises(FileNotFoundError):
        write_report(found, tmp_path / "gone" / "plan.html")


def test_the_flip_map_has_a_winner_everywhere(found):
    drawn = found.map
    assert len(drawn.winners) == len(drawn.ratios) and all(len(row) == len(drawn.distances) for row in drawn.winners)
    assert all(gain >= -1e-9 for row in drawn.gains for gain in row)


# Launch files


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.permutations(["tp", "pp", "dp", "cp"]), st.permutations(["tp", "pp", "dp", "cp"]),
       st.lists(st.sampled_from([1, 2, 3, 4]), min_size=4, max_size=4))
def test_every_rank_lies_where_the_plan_puts_it(placed, numbered, ranks):
    sizes = dict(zip(("tp", "pp", "dp", "cp"), ranks, strict=True))
    devices = devices_of_ranks(sizes, placed, numbered)
    assert sorted(devices) == list(range(int(np.prod(ranks))))
    for rank, device in enumerate(devices):
        for axes, number, other in ((numbered, rank, device),):
            place, stride = {}, 1
            for axis in axes:
                place[axis] = number // stride % sizes[axis]
                stride *= sizes[axis]
            expected, stride = 0, 1
            for axis in placed:
                expected += place[axis] * stride
                stride *= sizes[axis]
            assert other == expected


def plan_of(sizes, order, schedule="1f1b", chunks=1, **changed):
    return measured(cluster(), job(), Layout(sizes, order=order, schedule=schedule, chunks=chunks,
                                             recompute="selective",
                                             **changed))


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_torch_loads_the_schedule_that_is_written(tmp_path, schedule, chunks):
    plan = plan_of({"tp": 2, "dp": 2, "pp": 2}, ("tp", "dp", "pp"), schedule, chunks)
    files = {path.name: path for path in emit(plan, "torchtitan", tmp_path / "out")}
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime = object.__new__(_PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = 2, 2 * chunks, plan.microbatches
    runtime.pipeline_order, runtime._stages, runtime._defer_pp_recv = {}, [], False
    runtime._load_csv(str(files["schedule.csv"]))  # it adds sends and receives, and validates
    assert runtime.stage_index_to_group_rank == dict(enumerate(plan.schedule().placement))
    with files["schedule.csv"].open(newline="") as file:
        rows = [[_Action.from_str(cell) for cell in row] for row in csv.reader(file)]
    assert len(rows) == 2
    expected = [[(op.chunk, op.microbatch) for op in device] for device in plan.schedule().ops]
    flat = [[(action.stage_index, action.microbatch_index) for action in row if action.sub_actions is None]
            for row in rows]
    assert flat == expected
    assert json.loads(files["device_mesh.json"].read_text())["in_order"] is True
    words = torchtitan.options(plan)
    assert words["--parallelism.pipeline-parallel-degree"] == 2 and "torchtitan.train" in files["run.sh"].read_text()


def test_a_mesh_that_is_not_the_runtimes_is_written_out(tmp_path):
    plan = plan_of({"tp": 2, "dp": 2, "pp": 2}, ("pp", "tp", "dp"))
    emit(plan, "torchtitan", tmp_path)
    mesh = json.loads((tmp_path / "device_mesh.json").read_text())
    assert not mesh["in_order"] and sorted(mesh["devices"]) == list(range(8))
    # Neighbouring devices are the two stages: rank 4, the second stage's first, is the second device.
    assert mesh["devices"][4] == 1


def test_megatron_gets_its_arguments(tmp_path):
    plan = plan_of({"tp": 2, "dp": 2, "pp": 2}, ("tp", "pp", "dp"), "interleaved", 2)
    options = megatron.options(plan)
    assert options["--use-tp-pp-dp-mapping"] and options["--pipeline-model-parallel-layout"] == "'Et*2|t*2|t*2|t*2L'"
    text = {path.name: path.read_text() for path in emit(plan, "megatron", tmp_path)}["run.sh"]
    assert "--tensor-model-parallel-size 2" in text
    assert subprocess.run(["bash", "-n", str(tmp_path / "run.sh")], check=False).returncode == 0
    with pytest.raises(ValueError, match="1f1b and interleaved"):
        emit(plan_of({"pp": 2, "dp": 4}, ("dp", "pp"), "zb_h1"), "megatron", tmp_path / "no")
    assert not (tmp_path / "no").exists()


def ranker():
    return load_job({"kind": "recommender", "name": "ranker", "batch": 512, "layers": 2, "width": 256, "heads": 4,
                     "top": [256, 512, 1], "lengths": {"mean": 50},
                     "tables": [{"name": "items", "rows": 100_000, "width": 256, "sequence": True}]})


def test_torchrec_and_semel_get_theirs(tmp_path):
    plan = measured(cluster(), ranker(), Layout({"table": 4, "dp": 2}, order=("table", "dp"), microbatch=64))
    emit(plan, "torchrec", tmp_path)
    document = json.loads((tmp_path / "torchrec.json").read_text())
    assert document["topology"]["world_size"] == 8 and document["batch_size"] == 64
    assert document["constraints"]["items"]["sharding_types"][0] == "row_wise"
    for system in ("torchrec", "semel"):  # every rank has its place, also those that share a table
        emit(plan, system, tmp_path)
        mesh = json.loads((tmp_path / "device_mesh.json").read_text())
        assert math.prod(axis["ranks"] for axis in mesh["axes_innermost_first"]) == 8 and mesh["in_order"]
    from semel import recipes
    from semel.training import override, read_overrides

    recipe = override(recipes.get("ml1m_rank"), read_overrides(tmp_path / "plan.toml"))
    assert recipe.batch == 512 and recipe.pieces == 8 and recipe.precision == "bfloat16"


def test_torchrecs_own_planner_plans_with_them(tmp_path):
    planner = pytest.importorskip("torchrec.distributed.planner")
    import torch
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    tables = [{"name": "posts", "rows": 100_000, "width": 256},
              {"name": "tags", "rows": 1_000, "width": 64, "count": 2}]
    job = load_job({"kind": "recommender", "name": "ranker", "batch": 512, "layers": 2, "width": 256, "heads": 4,
                    "top": [256, 512, 1], "lengths": {"mean": 50}, "tables": tables})
    emit(measured(cluster(), job, Layout({"table": 4, "dp": 2}, order=("table", "dp"), microbatch=64)), "torchrec",
         tmp_path)
    document = json.loads((tmp_path / "torchrec.json").read_text())
    held = EmbeddingBagCollection(device=torch.device("meta"), tables=[
        EmbeddingBagConfig(name=name, embedding_dim=width, num_embeddings=rows, feature_names=[name])
        for name, width, rows in (("posts", 256, 100_000), ("tags_0", 64, 1_000), ("tags_1", 64, 1_000))])
    found = planner.EmbeddingShardingPlanner(
        topology=planner.Topology(**document["topology"]), batch_size=document["batch_size"],
        constraints={name: planner.ParameterConstraints(**each) for name, each in document["constraints"].items()},
    ).plan(held, [EmbeddingBagCollectionSharder()])
    chosen = {name: one.sharding_type for module in found.plan.values() for name, one in module.items()}
    assert chosen.keys() == document["constraints"].keys()
    assert all(kind in document["constraints"][name]["sharding_types"] for name, kind in chosen.items())


@pytest.mark.parametrize("system", ["torchrec", "semel"])
def test_a_transformer_is_not_for_them(system, tmp_path):
    with pytest.raises(ValueError, match="transformer"):
        emit(plan_of({"dp": 8}, ("dp",)), system, tmp_path)
    with pytest.raises(ValueError, match="recommender"):
        emit(measured(cluster(), ranker(), Layout({"dp": 8}, order=("dp",))), "megatron", tmp_path)


def test_an_unknown_system_names_all(tmp_path):
    with pytest.raises(ValueError, match="torchtitan, megatron, torchrec, semel"):
        emit(plan_of({"dp": 8}, ("dp",)), "alpa", tmp_path)


# The package


def test_planning_imports_nothing_else_of_semel_and_no_torch():
    code = ("import sys; import semel.planning, semel.planning.explain, semel.planning.report.sections, "
            "semel.planning.emit.torchtitan; "
            "print(sorted({name.split('.')[1] for name in sys.modules if name.startswith('semel.')}), 'torch' in "
            "sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True).stdout
    assert out.strip() == "['planning'] False"
