"""``semel info``: versions, devices, and which extras are installed."""

from __future__ import annotations

from typing import Annotated, Any

import typer

CORE = ("torch", "numpy", "pyarrow", "numba", "safetensors", "typer", "rich", "fastapi", "uvicorn", "httpx",
        "prometheus-client", "platformdirs", "plotly", "jinja2", "tensorboard", "obstore")
EXTRAS = {
    "ray": "more than one machine",
    "confluent-kafka": "events and exposures from Kafka",
    "faiss-cpu": "retrieval from very large catalogues",
    "redis": "deltas over Redis",
    "nats-py": "deltas over NATS",
    "triton": "GPU kernels",
    "torchrec": "table shards on GPUs",
    "fbgemm-gpu": "table shards on GPUs",
    "pylance": "interchange as Lance",
}


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Versions, devices, and which extras are there."""
    facts = gather()
    from semel.cli import output

    if as_json:
        output.print_json(facts)
        return
    console = output.results()
    versions = {"semel": facts["semel"], "python": facts["python"], **facts["packages"]}
    console.print(output.table(None, ["package", "version"], [[k, v or "missing"] for k, v in versions.items()]))
    console.print(output.table(None, ["device", "what it is"], [[d["name"], d["what"]] for d in facts["devices"]]))
    extras = [[name, version or "-", EXTRAS[name]] for name, version in facts["extras"].items()]
    console.print(output.table(None, ["extra", "version", "what for"], extras))


def gather() -> dict[str, Any]:
    """The facts that ``semel info --json`` prints."""
    import platform

    from semel import __version__

    return {
        "semel": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in CORE},
        "devices": _devices(),
        "extras": {name: _version(name) for name in EXTRAS},
    }


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import os
    import platform

    import torch

    devices = [{"name": "cpu", "what": f"{platform.machine()}, {os.cpu_count()} cores, "
                                       f"{torch.get_num_threads()} torch threads"}]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append({"name": f"cuda:{index}",
                        "what": f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"})
    if torch.backends.mps.is_available():
        devices.append({"name": "mps", "what": "Apple GPU"})
    return devices
