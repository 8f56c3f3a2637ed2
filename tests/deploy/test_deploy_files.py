"""The Dockerfile and the Kubernetes example agree with the server as it is: flags, ports, probes, times."""

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from typer.testing import CliRunner

from semel import serving
from semel.cli import app
from semel.serving.gate import OPEN_PATHS
from semel.serving.options import ServerOptions
from semel.serving.process import GRACE_SECONDS
from semel.serving.supervisor import GRACE_SECONDS as CHILD_SECONDS

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.fixture(scope="module")
def options():
    """The options of ``semel serve`` by their flags."""
    command = typer.main.get_command(app).commands["serve"]
    return {flag: parameter for parameter in command.params for flag in parameter.opts}


@pytest.fixture(scope="module")
def dockerfile():
    """(instruction, arguments) of each, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (DEPLOY / "Dockerfile").read_text())
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line and not line.startswith("#")]


@pytest.fixture(scope="module")
def pod():
    kinds = {part["kind"]: part for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert set(kinds) == {"Service", "PersistentVolumeClaim", "StatefulSet"}
    return kinds


def given(arguments):
    """{flag: value} and the positional ones of a command line in either form."""
    flags, positional, words = {}, [], list(arguments)
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            flags[flag] = value or words.pop(0)
        else:
            positional.append(word)
    return flags, positional


@pytest.fixture
def accepted(options, monkeypatch, tmp_path):
    """Gives a command line to the real command, which must start a server with it; the flags."""

    def run(arguments):
        flags, positional = given(arguments)
        assert len(positional) == 1 and set(flags) <= set(options)
        (tmp_path / "token").write_text("a-token-of-the-secret")
        started = []
        monkeypatch.setattr(serving, "run_server", lambda *places, **named: started.append((places, named)))
        words = [word.replace(flags["--token-file"], str(tmp_path / "token")) for word in arguments]
        result = CliRunner().invoke(app, ["serve", *words])
        assert result.exit_code == 0, result.stderr
        [((run_folder, store, host, port), named)] = started
        assert (str(run_folder), str(store), host) == (positional[0], flags["--store"], "0.0.0.0")
        workers = named.pop("workers")
        named.pop("ready")
        ServerOptions(str(run_folder), str(store), **named).check(host, port, workers)
        return flags

    return run


def test_the_image_runs_the_server_with_flags_that_it_has(dockerfile, accepted):
    by_name = dict(dockerfile)
    assert json.loads(by_name["ENTRYPOINT"]) == ["semel", "serve"] and by_name["STOPSIGNAL"] == "SIGTERM"
    flags = accepted(json.loads(by_name["CMD"]))
    assert flags["--port"] == by_name["EXPOSE"] and "--token-file" in flags and flags["--host"] == "0.0.0.0"
    probe = json.loads(by_name["HEALTHCHECK"].partition("CMD ")[2])[2]
    address, path = re.search(r"http://127.0.0.1:(\d+)(/\w+)", probe).groups()
    assert address == flags["--port"] and path in OPEN_PATHS
    for source in ("pyproject.toml", "README.md", "LICENSE", "semel"):  # what is copied is there
        assert (DEPLOY.parent / source).exists()
    assert [value for name, value in dockerfile if name == "USER"] == ["semel"]


def test_the_pod_runs_the_image_with_flags_ports_and_probes_that_fit(pod, accepted):
    spec = pod["StatefulSet"]["spec"]
    assert spec["replicas"] == 1  # a store has one writer
    template = spec["template"]["spec"]
    [container] = template["containers"]
    flags = accepted(container["args"])
    [port] = container["ports"]
    assert str(port["containerPort"]) == flags["--port"]
    assert spec["template"]["metadata"]["annotations"]["prometheus.io/port"] == flags["--port"]
    for name, path in (("startupProbe", "/healthz"), ("readinessProbe", "/readyz"), ("livenessProbe", "/healthz")):
        probe = container[name]["httpGet"]
        assert probe["path"] == path and path in OPEN_PATHS and probe["port"] == port["name"]
    assert pod["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert pod["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"] == {"app": "semel"}
    assert template["terminationGracePeriodSeconds"] > max(GRACE_SECONDS, CHILD_SECONDS)
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in template["volumes"]}
    for path in (flags["--store"], flags["--token-file"]):
        assert any(path.startswith(mount) for mount in mounts)
    assert template["volumes"][0]["persistentVolumeClaim"]["claimName"] == (
        pod["PersistentVolumeClaim"]["metadata"]["name"])


def test_the_operations_page_explains_every_flag_and_metric_that_there_is(options):
    from semel.serving.metrics import Metrics

    page = (DEPLOY.parent / "docs" / "operations.md").read_text()
    for metric in re.findall(r"# TYPE (\S+)", Metrics().text().decode()):
        assert metric.removesuffix("_created").removesuffix("_total") in page, metric
    service = (DEPLOY.parent / "semel" / "serving" / "service.py").read_text()
    for metric in re.findall(r'watch\("(\w+)"', service):
        assert metric in page, metric
    for flag in options:
        if flag.startswith("--") and flag != "--help":
            assert f"`{flag}`" in page or f"`{flag} " in page, flag
