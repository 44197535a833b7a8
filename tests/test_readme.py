import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_quickstart_runs_and_agrees_with_dense_attention():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 12
    names = {}
    exec(code, names)
    key, value = (names[name].reshape(-1, 2, 64) for name in ("key_pages", "value_pages"))
    for request in range(3):
        slots = names["forest"].context_slots(request)
        expected = jax.nn.dot_product_attention(names["query"][request], key[slots], value[slots])
        np.testing.assert_allclose(names["out"][request], expected, atol=1e-5)


def test_sharing_in_the_quickstart_stores_the_document_once():
    names = {}
    exec(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1).split("plan =")[0], names)
    assert jnp.sum(names["forest"].length) == 1000 + 2 + 1 + 3
