"""What benchmarks run: contenders, problems, models."""
