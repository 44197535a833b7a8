"""Settings of every test: strict dtypes, exact products, reproducible examples, GPU tests only where there is a GPU."""

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
# A GPU would round the factors of float32 products to 10 bits, also in the references.
jax.config.update("jax_default_matmul_precision", "highest")

hypothesis.settings.register_profile("reproducible", deadline=None, derandomize=True)
hypothesis.settings.load_profile("reproducible")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]
