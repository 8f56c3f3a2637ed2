"""``semel serve``: its options reach the server. The server itself is tested where it is."""

from pathlib import Path

import pytest

from semel import serving


@pytest.mark.parametrize(("options", "share", "state_bytes"), [
    ([], True, 256 << 20), (["--no-share"], False, 256 << 20), (["--state-cache", "3"], True, 3 << 20)])
def test_sharing_is_the_default_and_can_be_turned_off(semel, monkeypatch, options, share, state_bytes):
    given = {}
    monkeypatch.setattr(serving, "run_server", lambda *_, **named: given.update(named))
    result = semel("serve", Path("run"), *options)
    assert result.exit_code == 0, result.stderr
    assert given["share"] is share and given["state_bytes"] == state_bytes
