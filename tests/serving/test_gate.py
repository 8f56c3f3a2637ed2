"""Who may bind and who may ask."""

import pytest

from semel.serving.gate import check_binding, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost", "LOCALHOST", "localhost."])
def test_loopback_needs_no_token(host):
    assert is_loopback(host)
    check_binding(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "example.org", "localhost.example.org",
                                  "127.0.0.1.example.org"])
def test_anything_else_does(host):
    with pytest.raises(ValueError, match="--token"):
        check_binding(host, None)
    check_binding(host, "s3cret-token")


@pytest.mark.parametrize("token", ["", "short", "with space", "tab\there12", "ключ-ключ", "line\nbreak1"])
def test_tokens_that_cannot_protect_or_be_sent_are_refused(token):
    with pytest.raises(ValueError, match="--token must be"):
        check_binding("127.0.0.1", token)
