"""Planning: estimates what a call or a model costs before anything is allocated, and recommends settings for a use case."""

from dilated_attention.planning.advice.answer import Recommendation, Setting
from dilated_attention.planning.advice.recommend import USE_CASES, recommend
from dilated_attention.planning.estimate.gpus import GPUS, Gpu, detected_gpu, find_gpu
from dilated_attention.planning.estimate.plan import plan_attention
from dilated_attention.planning.plans import AttentionPlan, ModelPlan, Plan
from dilated_attention.planning.whole_models.model_plan import plan_model

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
