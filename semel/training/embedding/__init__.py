"""Embedding tables whose rows are shared by ranks, and the schedules by which rows and gradients travel."""

from semel.training.embedding.schedule import Blocking, Prioritized
from semel.training.embedding.table import SGD, Adam, RowOptimizer, RowWiseAdagrad, ShardedEmbedding

__all__ = ["SGD", "Adam", "Blocking", "Prioritized", "RowOptimizer", "RowWiseAdagrad", "ShardedEmbedding"]
