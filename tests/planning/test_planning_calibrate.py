"""Curves back from measurements made with a known curve, from a table and from a profiler's trace."""

import gzip
import json
import math

import numpy as np
import pytest

from semel.planning import load_cluster
from semel.planning.calibrate import (
    Sample,
    calibrated,
    device_toml,
    fit_curve,
    golden,
    messages,
    read_table,
    read_trace,
)
from semel.planning.curves import Curve
from semel.planning.load import load_device

H100 = load_device("h100")
KNOWN = Curve(((256.0, 0.1), (1024.0, 0.4), (4096.0, 0.6), (16384.0, 0.7)))


def measured(seed=0, noise=0.02):
    random = np.random.default_rng(seed)
    rows = []
    for octave in range(8, 15):
        for _ in range(9):
            size = 2.0**octave
            share = KNOWN(size) * (1 + noise * random.standard_normal())
            rows.append(Sample("matmul", (size, size, size), 2 * size**3 / (share * 989e12)))
    return rows


def test_a_curve_comes_back_from_noisy_samples():
    found = calibrated(H100, measured())
    for octave in range(8, 15):
        assert found.matmul(2.0**octave) == pytest.approx(KNOWN(2.0**octave), rel=0.03)
    assert found.reached == {}  # the new curve is what was measured
    assert found.attention == H100.attention
    assert found.vector == H100.vector


def test_curves_never_fall():
    found = fit_curve([(1024, 0.5), (2048, 0.4), (4096, 0.6), (8192, 0.55)])
    shares = [share for _, share in found.points]
    assert shares == sorted(shares)
    assert found(1024) == found(2048) == pytest.approx(0.45)


def test_a_table(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("kind,m,n,k,bytes,ranks,sequence,flops,seconds,dtype\n"
                    "matmul,8192,8192,8192,,,,,0.0018,bf16\n"
                    "matmul,8192,8192,8192,,,,,0.0009,fp8\n"
                    "elementwise,,,,1e9,,,,0.0004,\n"
                    "attention,,,,,,8192,1e12,0.002,bf16\n"
                    "collective,,,,1e8,8,,,0.001,\n")
    samples = read_table(path)
    assert [sample.kind for sample in samples] == ["matmul", "matmul", "elementwise", "attention", "collective"]
    found = calibrated(H100, samples)
    assert found.matmul(8192) == pytest.approx(2 * 8192**3 / 0.0018 / 989e12, rel=1e-2)
    assert found.attention(8192) == pytest.approx(1e12 / 0.002 / 989e12)
    assert found.vector == pytest.approx(1e9 / 0.0004 / 3.35e12)
    assert messages(samples, 450e9)(1e8) == pytest.approx(2 * 7 / 8 * 1e8 / 0.001 / 450e9)


@pytest.mark.parametrize(("text", "said"), [
    ("a,b\n1,2\n", "must name the columns"), ("kind,seconds\nmatmull,1\n", "line 2: unknown kind 'matmull'"),
    ("kind,m,n,k,seconds\nmatmul,1,2,x,1\n", "line 2: a matmul row needs numbers"), ("kind,seconds\n", "no rows"),
    ("kind,m,n,k,seconds\nmatmul,1,2,3,0\n", "line 2: sizes and seconds must be above 0"),
    ("kind,bytes,seconds,dtype\nelementwise,1,1,bf61\n", "line 2: unknown dtype"),
])
def test_a_wrong_table_is_one_clear_error(tmp_path, text, said):
    path = tmp_path / "table.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        read_table(path)


def trace(on_device):
    events = []
    for index, (m, k, n) in enumerate([(4096, 4096, 4096), (8192, 4096, 4096)]):
        args = {"External id": index, "Input Dims": [[m, k], [k, n]], "Input type": ["c10::BFloat16"] * 2}
        dur = 900.0 if on_device else 300.0
        events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "dur": dur, "args": args})
        if on_device:
            events.append({"ph": "X", "cat": "kernel", "name": "gemm", "dur": 300.0, "args": {"External id": index}})
    events.append({"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "dur": 500.0, "args": {
        "External id": 9, "Collective name": "allreduce", "In msg nelems": 1_000_000, "dtype": "BFloat16",
        "Group size": 8}})
    if on_device:
        events.append({"ph": "X", "cat": "kernel", "name": "nccl", "dur": 200.0, "args": {"External id": 9}})
    events.append({"ph": "M", "name": "process_name"})
    return {"traceEvents": events}


@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_with_kernels_and_one_without(tmp_path, zipped):
    for on_device, collective in ((True, 200e-6), (False, 500e-6)):
        path = tmp_path / ("trace.json.gz" if zipped else "trace.json")
        text = json.dumps(trace(on_device)).encode()
        path.write_bytes(gzip.compress(text) if zipped else text)
        samples = read_trace(path)
        assert [sample.sizes for sample in samples[:2]] == [(4096, 4096, 4096), (8192, 4096, 4096)]
        assert all(math.isclose(sample.seconds, 300e-6) and sample.dtype == "bf16" for sample in samples[:2])
        assert samples[2] == Sample("collective", (2e6, 8.0), pytest.approx(collective))


@pytest.mark.parametrize("text", ["no json", "{}", '{"traceEvents": []}', "[1, 2]"])
def test_a_wrong_trace_is_one_clear_error(tmp_path, text):
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"trace\.json: "):
        read_trace(path)
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"{}")[:8])
    with pytest.raises(ValueError, match=r"cut\.json\.gz: "):
        read_trace(tmp_path / "cut.json.gz")


@pytest.mark.slow  # the profiler takes seconds to start
def test_what_torch_s_own_profiler_writes(tmp_path):
    torch = pytest.importorskip("torch")
    path = tmp_path / "trace.json"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(3):
            torch.zeros(64, 128) @ torch.zeros(128, 32)
    profiler.export_chrome_trace(str(path))
    samples = [sample for sample in read_trace(path) if sample.kind == "matmul"]
    assert [sample.sizes for sample in samples] == [(64.0, 32.0, 128.0)] * 3
    assert all(sample.seconds > 0 and sample.dtype == "fp32" for sample in samples)


def test_a_calibrated_device_writes_a_file_that_reads_back(tmp_path):
    found = calibrated(H100, measured())
    path = tmp_path / "mine.toml"
    path.write_text(device_toml(found, "measured here"))
    again = load_device(path)
    assert again.matmul(4096) == pytest.approx(found.matmul(4096), rel=1e-3)
    assert again.peak == pytest.approx(found.peak)
    assert again.memory == pytest.approx(found.memory, abs=1)
    cluster = load_cluster({"like": "host-h100", "device": str(path)})
    assert cluster.device.matmul == again.matmul


def test_what_was_not_measured_is_called_assumed_in_the_file(tmp_path):
    samples = [sample for sample in measured() if sample.kind == "matmul"]
    path = tmp_path / 'of a "quoted" name.toml'
    path.write_text(device_toml(calibrated(H100, samples), path.name, H100))
    origins = {}
    load_device(path, origins)
    said = {key.split(".")[-1]: origin.assumed for key, origin in origins.items()}
    assert said == {"matmul": False, "attention": True, "vector": True}


def test_golden_section():
    assert golden(lambda x: (x - 0.7) ** 2, 0.0, 2.0) == pytest.approx(0.7, abs=1e-3)
