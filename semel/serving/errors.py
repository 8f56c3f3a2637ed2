"""What can go wrong with one request, apart from bugs."""

from __future__ import annotations


class InvalidRequest(ValueError):
    """The request itself is wrong; ``field`` is the path of what is wrong (``candidates.3``). HTTP 422."""

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field, self.message = field, message


class Overloaded(RuntimeError):
    """There is more work than the bounded queue holds; try again in ``retry_after`` seconds. HTTP 503."""

    def __init__(self, message: str, retry_after: int = 1):
        super().__init__(message)
        self.retry_after = retry_after


class NonFiniteScore(ArithmeticError):
    """The model gave NaN or infinity for a request. HTTP 500: never a silent NaN, never a made-up score."""
