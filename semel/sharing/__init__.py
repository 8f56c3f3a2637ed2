"""Compute once: the request side of a model, once per request. Usable alone, with any PyTorch ranker."""

from semel.sharing.errors import SharingError
from semel.sharing.package import LoadedModel, load
from semel.sharing.shared import RequestState, SharedModel, share

__all__ = ["LoadedModel", "RequestState", "SharedModel", "SharingError", "load", "share"]
