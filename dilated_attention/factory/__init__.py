"""Selection: hardware, backends and the reasons for each, presets, modules by name."""

from dilated_attention.backends import Hardware, detect
from dilated_attention.factory.create import KINDS, create_attention, create_model
from dilated_attention.factory.explain import EXAMPLES, Explanation, explain_backend, list_backends
from dilated_attention.factory.presets import ATTENTION_PRESETS, MODEL_PRESETS, AttentionPreset

__all__ = [
    "ATTENTION_PRESETS",
    "EXAMPLES",
    "KINDS",
    "MODEL_PRESETS",
    "AttentionPreset",
    "Explanation",
    "Hardware",
    "create_attention",
    "create_model",
    "detect",
    "explain_backend",
    "list_backends",
]
