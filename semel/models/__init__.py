"""Models that map a ``RequestBatch`` to logits, and how they are kept on disk."""

from semel.batch import register_pytrees
from semel.models.artifact import (
    Model,
    ModelArtifact,
    ModelVersion,
    current_version,
    exported,
    install,
    load_model,
    make_model,
    model_versions,
    restore_version,
    save_model,
)
from semel.models.config import EncoderConfig, ModelConfig
from semel.models.dcn import RDCN, DCNv2, RDCNLayer
from semel.models.deep_cross_attention import DeepCrossAttention
from semel.models.dhen import DHEN, IsolatedDHEN
from semel.models.dlrm import DLRM
from semel.models.early_ranker import EarlyRanker
from semel.models.final_mlp import FinalMLP, IsolatedFinalMLP
from semel.models.flops import Cost, cost_of
from semel.models.heads import RankingHead, ranking_loss
from semel.models.hstu import HSTU
from semel.models.isolated import Sides
from semel.models.next_item import NextItem
from semel.models.reallocation import widen_candidate, widen_request
from semel.models.retrieval import TopK, top_k
from semel.models.sequence_dcnv2 import SequenceDCNv2
from semel.models.sequence_ranker import SequenceRanker
from semel.models.transformer import Transformer
from semel.models.vocabulary import Scale, Vocabulary
from semel.models.wukong import IsolatedWukong, Wukong

register_pytrees()

__all__ = [
    "DHEN", "DLRM", "HSTU", "RDCN", "Cost", "DCNv2", "DeepCrossAttention", "EarlyRanker", "EncoderConfig", "FinalMLP",
    "IsolatedDHEN", "IsolatedFinalMLP", "IsolatedWukong", "Model", "ModelArtifact", "ModelConfig", "ModelVersion",
    "NextItem", "RDCNLayer", "RankingHead", "Scale", "SequenceDCNv2", "SequenceRanker", "Sides", "TopK", "Transformer",
    "Vocabulary", "Wukong", "cost_of", "current_version", "exported", "install", "load_model", "make_model",
    "model_versions", "ranking_loss", "restore_version", "save_model", "top_k", "widen_candidate", "widen_request",
]
