"""Planning: estimates what a call or a model costs before anything is allocated, and recommends settings for a use case."""

from dilated_attention.planning.attention_plan import AttentionPlan
from dilated_attention.planning.gpus import GPUS, Gpu, detected_gpu, find_gpu
from dilated_attention.planning.model_plan import ModelPlan, plan_model
from dilated_attention.planning.module_plan import module_memory
from dilated_attention.planning.plan import plan_attention
from dilated_attention.planning.recommend import USE_CASES, recommend
from dilated_attention.planning.recommendation import Recommendation, Setting

__all__ = [
    "GPUS",
    "USE_CASES",
    "AttentionPlan",
    "Gpu",
    "ModelPlan",
    "Recommendation",
    "Setting",
    "detected_gpu",
    "find_gpu",
    "module_memory",
    "plan_attention",
    "plan_model",
    "recommend",
]
