"""Units, TOML and the ready library: what a user writes, and what is said when it is wrong."""

import math
import re
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.planning import load_cluster, load_job, ready
from semel.planning.files import KINDS, LIBRARY, find
from semel.planning.load import load_device, load_technology
from semel.planning.units import UNITS, parse, text

DEVICE = {"name": "toy", "peak": {"bf16": "100 Tflop/s"}, "memory": "16 GiB", "memory_bandwidth": "1 TB/s",
          "matmul": 0.5, "attention": 0.5, "vector": 0.8, "kernel": "1 us", "reserved": "0 B"}


def cluster(**changed):
    host = {"name": "host", "count": 8, "bandwidth": "450 GB/s", "latency": "1 us", "domain": True}
    rack = {"name": "rack", "count": 4, "bandwidth": "400 Gbit/s", "latency": "5 us"}
    return {"name": "toy", "device": dict(DEVICE), "levels": [host, rack], **changed}


@pytest.mark.parametrize(("written", "kind", "value"), [
    ("400 Gbit/s", "bandwidth", 50e9), ("50GB/s", "bandwidth", 50e9), ("80 GiB", "size", 80 * 2**30),
    ("5 us", "time", 5e-6), ("989 Tflop/s", "rate", 989e12), ("40 km", "distance", 40e3),
    ("0.02 $/GB", "egress", 2e-11), ("1_000 B", "size", 1e3),
])
def test_units(written, kind, value):
    assert parse(written, kind) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(("written", "kind", "said"), [
    (400, "bandwidth", "has no unit"), ("400", "bandwidth", "has no unit"),
    ("400 Gb", "bandwidth", "unknown unit 'Gb'"),
    ("80 gib", "size", "did you mean 'GiB'"), ("-1 s", "time", "negative"), ("fast", "bandwidth", "is no bandwidth"),
    (True, "size", "expected a size"),
])
def test_a_wrong_quantity_is_one_clear_error(written, kind, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        parse(written, kind, "levels.zone.bandwidth")
    assert "levels.zone.bandwidth" in str(error.value)
    assert "\n" not in str(error.value)


@settings(deadline=None)
@given(st.sampled_from(sorted(UNITS)), st.floats(1e-3, 1e15))
def test_text_reads_back(kind, value):
    assert math.isclose(parse(text(value, kind), kind), value, rel_tol=1e-3)


@pytest.mark.parametrize(("wrong", "said"), [
    ({"levels": [{"name": "host", "count": 8, "bandwith": "1 GB/s", "latency": "1 us"}]}, "did you mean 'bandwidth'"),
    ({"levels": [{"name": "host", "count": 8, "bandwidth": "1 GB/s", "latency": "1 us", "sharng": "unit"}]},
     "levels.host.sharng: unknown field; did you mean 'sharing'"),
    ({"levels": [{"name": "host", "count": 8, "bandwidth": "1 GB/s", "latency": 5}]},
     "levels.host.latency: 5 has no unit"),
    ({"levels": [{"name": "host", "count": 0, "bandwidth": "1 GB/s", "latency": "1 us"}]}, "must be at least 1"),
    ({"levels": []}, "at least one [[levels]]"),
    ({"devices": 30}, "says 30, but the levels give 8 x 4 = 32"),
    ({"units": [{"devices": 8}] * 3}, "3 are given, but level 'rack' joins 4"),
    ({"units": [{"devices": 16}] * 4}, "16 is more than the 8"),
    ({"units": [{"devices": 7}] * 4}, "no multiple of the 8 devices of a host"),
    ({"device": "h10"}, "did you mean 'h100'"),
    ({"colour": "red"}, "colour: unknown field"),
])
def test_a_wrong_cluster_is_one_clear_error(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        load_cluster(cluster(**wrong))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("wrong", "said"), [
    ({"heads": 7}, "7 heads do not divide width 4096"), ({"kv_heads": 5}, "kv_heads"), ({"experts": 8}, "top_k"),
    ({"top_k": 2}, "experts is not"), ({"layer": 3}, "did you mean 'layers'"),
    ({"dtype": "bf61"}, "did you mean 'bf16'"), ({"layers": "many"}, "expected a whole number"),
    ({"dense_layers": 99}, "dense_layers"), ({"tied": 1}, "true or false"), ({"batch": 0}, "at least 1"),
])
def test_a_wrong_job_is_one_clear_error(wrong, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        load_job({"like": "llama3-8b", **wrong})


def test_a_file_that_is_not_there_or_not_toml(tmp_path):
    with pytest.raises(FileNotFoundError, match="did you mean 'selene'"):
        load_cluster("selen")
    with pytest.raises(FileNotFoundError, match="no such file"):
        load_job(tmp_path / "mine.toml")
    (tmp_path / "broken.toml").write_text("layers = \n")
    with pytest.raises(ValueError, match=r"broken\.toml: not a TOML file.*line 1"):
        load_job(tmp_path / "broken.toml")


def test_a_job_from_a_path_is_the_ready_one(tmp_path):
    path = tmp_path / "copy.toml"
    path.write_text(find("jobs", "llama3-70b").read_text())
    copy, ready_one = load_job(path), load_job("llama3-70b")
    assert copy.parameters() == ready_one.parameters()
    assert copy.name == "copy"


def test_unequal_units_and_other_devices():
    levels = [{"name": "host", "count": 8, "bandwidth": "450 GB/s", "latency": "1 us"},
              {"name": "building", "count": 4, "bandwidth": "50 GB/s", "latency": "5 us"},
              {"name": "region", "count": 3, "bandwidth": "5 GB/s", "latency": "50 us"}]
    units = [{"devices": 32, "repeat": 2}, {"devices": 16, "device": "a100-80"}]
    found = load_cluster(cluster(levels=levels, units=units))
    assert [unit.devices for unit in found.units] == [32, 32, 16]
    assert found.devices == 80
    assert found.sizes == (8, 16, 80)
    assert [unit.device.name for unit in found.units] == ["toy", "toy", "a100-80"]


def test_scaling_one_coefficient():
    found = load_cluster("selene")
    assert found.scaled("levels.fabric.bandwidth", 2.0).level("fabric").bandwidth == 50e9
    better = found.scaled("levels.unit.technologies.infiniband.efficiency", 2.0)
    assert better.level("unit").technology().efficiency == 1.0
    assert found.scaled("devices.a100-80.peak.bf16", 0.5).device.peak["bf16"] == 156e12
    assert found.scaled("devices.a100-80.vector", 0.5).uniform
    with pytest.raises(KeyError, match="no such coefficient"):
        found.change("devices.a100-80.colour", 1)
    with pytest.raises(KeyError, match="no level 'moon'"):
        found.scaled("levels.moon.bandwidth", 2.0)
    for path in found.assumed:
        found.scaled(path, 1.3)  # every guess can be moved
    assert "levels.unit.latency" in found.assumed


COEFFICIENTS = {"bandwidth", "latency", "oversubscription", "loss", "distance", "messages", "egress", "memory",
                "efficiency", "memory_bandwidth", "matmul", "attention", "vector", "kernel", "reserved", "power",
                "price", "reached", "paths", "queue_pairs", "most_queue_pairs", "segment", "outstanding", "buffer",
                "concurrent", "reconfiguration"}


def _bare(data, path=""):
    for key, value in data.items():
        here = f"{path}.{key}"
        if key in ("peak", "reached"):
            yield from (f"{here}.{dtype}" for dtype, rate in value.items()
                        if not isinstance(rate, dict) or not ({"source", "assumed"} & set(rate)))
        elif key in COEFFICIENTS:
            if not isinstance(value, dict) or not ({"source", "assumed"} & set(value)):
                yield here
        elif isinstance(value, dict):
            yield from _bare(value, here)
        elif isinstance(value, list):
            for index, each in enumerate(value):
                if isinstance(each, dict):
                    yield from _bare(each, f"{here}[{index}]")


@pytest.mark.parametrize("kind", ["clusters", "devices", "technologies"])
def test_every_coefficient_of_the_library_says_where_it_is_from(kind):
    for path in sorted((LIBRARY / kind).glob("*.toml")):
        assert list(_bare(tomllib.loads(path.read_text()))) == [], path.name


def test_every_ready_file_loads_and_says_what_it_is():
    for kind in KINDS:
        for name, description in ready(kind):
            assert description, (kind, name)
            if kind == "clusters":
                assert load_cluster(name).devices > 0
            elif kind == "jobs":
                assert load_job(name).batch > 0
            elif kind == "devices":
                assert load_device(name).memory > 0
            elif kind == "technologies":
                assert load_technology(name).name == name
    for kind, wanted in {
        "devices": {"h100", "h200", "b200", "gb200", "a100-80", "mi300x"},
        "jobs": {"llama3-8b", "llama3-70b", "llama3-405b", "gpt3-175b", "deepseek-v3", "hstu-ranker", "dlrm"},
        "clusters": {"selene", "meta-region", "two-buildings-10km", "two-buildings-100km", "three-regions",
                     "gb200-nvl72", "cloud-zones"},
    }.items():
        assert wanted <= {name for name, _ in ready(kind)}


@pytest.mark.parametrize(("name", "billions", "active"), [
    ("llama3-8b", 8.03, 8.03), ("llama3-70b", 70.6, 70.6), ("llama3-405b", 405.9, 405.9), ("gpt3-175b", 174.6, 174.6),
    ("deepseek-v3", 671.0, 37.6),  # arXiv 2412.19437: 671 and 37 (the input embedding aside)
])
def test_published_parameter_counts(name, billions, active):
    job = load_job(name)
    assert job.parameters() / 1e9 == pytest.approx(billions, rel=2e-3)
    assert job.active_parameters() / 1e9 == pytest.approx(active, rel=2e-3)
