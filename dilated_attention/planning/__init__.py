"""Planning: estimates what a call or a model costs before anything is allocated, and recommends settings for a use case."""

from dilated_attention.planning.advice import USE_CASES, recommend
from dilated_attention.planning.attention import plan_attention
from dilated_attention.planning.gpus import GPUS, Gpu, detected_gpu, find_gpu
from dilated_attention.planning.models import plan_model
from dilated_attention.planning.plans import AttentionPlan, ModelPlan, Plan, Recommendation, Setting

__all__ = [
    "GPUS",
    "USE_CASES",
    "AttentionPlan",
    "Gpu",
    "ModelPlan",
    "Plan",
    "Recommendation",
    "Setting",
    "detected_gpu",
    "find_gpu",
    "plan_attention",
    "plan_model",
    "recommend",
]
