"""Compute once: the request side of a model, once per request. Usable alone, with any PyTorch ranker."""

from semel.sharing.errors import SharingError
from semel.sharing.shared import RequestState, SharedModel, share

__all__ = ["RequestState", "SharedModel", "SharingError", "share"]
