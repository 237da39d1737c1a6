"""Planning: what a call or a model takes, in figures, before anything is allocated."""

from dilated_attention.planning.gpus import GPUS, Gpu, detected_gpu, find_gpu
from dilated_attention.planning.plan import AttentionPlan, plan_attention

__all__ = ["GPUS", "AttentionPlan", "Gpu", "detected_gpu", "find_gpu", "plan_attention"]
