"""Models that map a ``RequestBatch`` to logits, and how they are kept on disk."""

from semel.batch import register_pytrees
from semel.models.artifact import Model, ModelArtifact, load_model, make_model, save_model
from semel.models.config import EncoderConfig, ModelConfig
from semel.models.heads import RankingHead, ranking_loss
from semel.models.hstu import HSTU
from semel.models.next_item import NextItem
from semel.models.rankers import DLRM, DCNv2, SequenceRanker
from semel.models.transformer import Transformer
from semel.models.vocabulary import Scale, Vocabulary

register_pytrees()

__all__ = [
    "DLRM", "HSTU", "DCNv2", "EncoderConfig", "Model", "ModelArtifact", "ModelConfig", "NextItem", "RankingHead",
    "Scale", "SequenceRanker", "Transformer", "Vocabulary", "load_model", "make_model", "ranking_loss", "save_model",
]
