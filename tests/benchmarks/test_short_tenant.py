"""What a short tenant reads does not depend on how long the histories are that the store keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.timeout(110)
def test_a_short_tenant_reads_no_more_of_a_long_store(printed: Callable[..., Any]) -> None:
    result = printed("short_tenant", "--users", "48", "--length", "3000", "--pointers", "2000", "--seconds", "0.1")
    base, head, middle = result["cases"].values()
    assert base["bytes_relative"] == 1 and base["bytes"] > 0
    assert head["bytes_relative"] <= 1.1
    assert head["bytes_relative"] < middle["bytes_relative"] <= result["middle_limit"]
