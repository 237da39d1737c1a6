"""Models that suites measure: language models of known shapes, pretrained ones with their texts, slide encoders, TorchScale's."""
