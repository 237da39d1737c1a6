"""Models over tiles and patches: slide encoders and vision transformers."""
