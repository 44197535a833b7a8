"""Commands that measure, and the pages on what they measured: `python -m benchmarks` lists them."""

_MEASURING = (
    "attention",
    "figure",
    "crossover",
    "decoding",
    "traffic",
    "ablation",
    "scores",
    "latent",
    "experts",
    "invariance",
    "tune",
    "ceilings",
    "your_gpu",
)
COMMANDS = (*_MEASURING, "serving", "vllm_serving", "vllm_decoding", "scaling", "churn", "planning", "plot", "report")
