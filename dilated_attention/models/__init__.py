"""Whole models built from the modules."""

from dilated_attention.models.blocks import Block, FeedForward
from dilated_attention.models.config import LongNetConfig, ModelConfig
from dilated_attention.models.evaluation import Bucket, Evaluation, evaluate
from dilated_attention.models.generation import Sampling, Stepper, generate, generate_stream, prefill
from dilated_attention.models.images.slide_config import SlideEncoderConfig
from dilated_attention.models.images.slide_encoder import SlideEncoder
from dilated_attention.models.images.slides import collate_slides, tile_step
from dilated_attention.models.images.vision import LongViT, VisionConfig
from dilated_attention.models.kv_cache import KVCache, PagedKVCache
from dilated_attention.models.language_model import LongNetLM
from dilated_attention.models.loss import average_gradients, sharded_cross_entropy, sharded_mean
from dilated_attention.models.saving import Pretrained
from dilated_attention.models.stack import LongNetDecoder, LongNetEncoder
from dilated_attention.models.text import BASES, BYTES, KmerEmbedding, Vocabulary, kmers, other_strand, read_fasta, vocabulary_of

__all__ = [
    "BASES",
    "BYTES",
    "Block",
    "Bucket",
    "Evaluation",
    "FeedForward",
    "KVCache",
    "KmerEmbedding",
    "LongNetConfig",
    "LongNetDecoder",
    "LongNetEncoder",
    "LongNetLM",
    "LongViT",
    "ModelConfig",
    "PagedKVCache",
    "Pretrained",
    "Sampling",
    "SlideEncoder",
    "SlideEncoderConfig",
    "Stepper",
    "VisionConfig",
    "Vocabulary",
    "average_gradients",
    "collate_slides",
    "evaluate",
    "generate",
    "generate_stream",
    "kmers",
    "other_strand",
    "prefill",
    "read_fasta",
    "sharded_cross_entropy",
    "sharded_mean",
    "tile_step",
    "vocabulary_of",
]
