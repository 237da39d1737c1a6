"""Planning: estimates what a call or a model costs before anything is allocated, and recommends settings for a use case."""

from dilated_attention.planning.advice.answer import Recommendation, Setting
from dilated_attention.planning.advice.recommend import USE_CASES, recommend
from dilated_attention.planning.estimate.gpus import GPUS, Gpu, detected_gpu, find_gpu
from dilated_attention.planning.estimate.plan import plan_attention
from dilated_attention.planning.plans import AttentionPlan, ModelPlan
from dilated_attention.planning.whole_models.model_plan import plan_model
from dilated_attention.planning.whole_models.module_memory import module_memory

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
