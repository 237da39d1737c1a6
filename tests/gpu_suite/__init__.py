"""The GPU tests as one command that ends: ``python -m tests.gpu_suite`` (``make test-gpu``, ``make test-gpus``)."""
