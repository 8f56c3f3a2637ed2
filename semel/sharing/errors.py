"""What can go wrong when a model is shared."""

from __future__ import annotations


class SharingError(ValueError):
    """A model or its inputs cannot be shared; the message names the place and the smallest change that would help."""


class Unproved(Exception):
    """A rule does not cover this case: the operator is computed for every candidate instead, which is always right."""


class MixesRows(Unproved):
    """An operator in which rows of the batch meet, so that a score would depend on the other candidates."""
