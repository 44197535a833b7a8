"""Commands that measure; results are written to benchmarks/results/."""
