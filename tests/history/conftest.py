"""An S3 server on the loopback interface, for the tests of object storage."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_NAMES = itertools.count()


@dataclass(frozen=True)
class Bucket:
    """A new prefix: its ``url``, and what ``HistoryStore.create`` and ``open`` take beside it."""

    url: str
    options: dict[str, Any]

    def objects(self) -> Any:
        from semel.history.storage.objects import Objects

        return Objects(self.url, self.options["storage_options"])


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """``memory://`` URLs name the same objects whenever they are opened."""
    store_module = pytest.importorskip("obstore.store")
    kept: dict[str, Any] = {}
    monkeypatch.setattr(store_module, "from_url",
                        lambda url, **_: kept.setdefault(url, store_module.MemoryStore()))


@pytest.fixture
def s3(s3_endpoint: str, tmp_path: Path) -> Bucket:
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(f"{s3_endpoint}/bucket", method="PUT"), timeout=10).close()
    options = {
        "storage_options": {
            "endpoint": s3_endpoint, "region": "us-east-1", "access_key_id": "key", "secret_access_key": "secret",
            "client_options": {"allow_http": True}, "retry_config": {"max_retries": 1},
        },
        "cache_folder": tmp_path / "cache",
    }
    return Bucket(f"s3://bucket/stores/{next(_NAMES)}", options)
