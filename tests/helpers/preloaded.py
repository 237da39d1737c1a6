"""What scripts and tests of several processes import: once, in the process that theirs are forked from."""

from __future__ import annotations

import contextlib
import gc
import importlib

MODULES = [
    "torch.distributed",
    "torch._dynamo",
    "tests.conftest",
    "dilated_attention",
    "dilated_attention.distributed",
    "dilated_attention.models",
    "dilated_attention.testing",
    "tests.helpers.ring_cases",
    "tests.functional.test_block_sparse",
    # of scripts that train, save and draw
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "safetensors.torch",
    "tqdm",
    "h5py",
    "sklearn.metrics",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    # of models of transformers
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "accelerate",
    "dilated_attention.integrations.huggingface",
]

for _name in MODULES:
    # an extra that is not installed is missed by the test that needs it
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
# else every process would look through all of it when it first collects garbage, and copy the pages
gc.collect()
gc.freeze()
