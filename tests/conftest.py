"""Settings of every test: strict dtypes, exact products, reproducible examples, GPU tests only where there is a GPU."""

import gc
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

# In interpret mode each warpgroup takes a thread of JAX's CPU client, which has as many as the machine has cores unless
# told otherwise: with too few, they wait for each other for ever. It is read when the client starts.
os.environ["PJRT_NPROC"] = "8"
# Workers share the machine: without these, each takes most of a GPU's memory, and all cores for its float64 references.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "2")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, whose threads keep cores busy that others are to have
# Most programs run once or twice, and on a CPU making machine code of them at full effort takes longer than it saves.
if shutil.which("nvidia-smi") is None:
    flags = ["--xla_backend_optimization_level=0", os.environ.get("XLA_FLAGS", "")]
    flags.append("--xla_cpu_parallel_codegen_split_count=1")  # small programs: parts cost more than they save
    if version("jaxlib").startswith("0.10."):  # newer ones have no other emitters, and end at a flag that is unknown
        flags.append("--xla_cpu_use_fusion_emitters=false")  # half the time
    if version("jaxlib").startswith(("0.10.", "0.11.")):
        # On a busy machine one of the devices may be late by more than 40 seconds.
        flags.append("--xla_cpu_collective_call_terminate_timeout_seconds=400")
    os.environ["XLA_FLAGS"] = " ".join(flags)

import hypothesis
import jax
import pytest
from xdist.scheduler import LoadFileScheduling

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# A GPU would round the factors of float32 products to 10 bits, also in the references.
jax.config.update("jax_default_matmul_precision", "highest")

# What several test files share asserts, too: these say which values differ.
pytest.register_assert_rewrite(
    "attending", "kernel_calls", "machine_code", "paged_rows", "plan_cases", "small_checkpoints"
)

hypothesis.settings.register_profile("reproducible", deadline=None, derandomize=True)
hypothesis.settings.load_profile("reproducible")


# Jaxprs are many small objects, and nearly all of them stay: looking through them all for garbage is done less often.
gc.set_threshold(50_000, 10, 10)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay to the end


class FilesTogether(LoadFileScheduling):
    """Files whose tests share a sampler go to one worker: another one would compile the same programs."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.startswith("tests/nnx/test_sampler"):
            return "sampler"
        return "game_sampler" if file.endswith(("test_tree_of_thoughts.py", "test_self_consistency.py")) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    return FilesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


#: Memory maps of a process after which it forgets its programs: a file of tests has taken up to 10,000 more.
_MANY_MAPS = 40_000


@pytest.fixture(scope="module", autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Forget compiled programs when there are many: without more memory maps, compiling ends the process.

    Linux lets a process have 65,530, and each program takes some.
    """
    yield
    if (maps := Path("/proc/self/maps")).exists() and maps.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def _others_set_aside() -> Iterator[None]:
    """For benchmarks that collect garbage between their runs: what other tests left is not looked through each time."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if jax.default_backend() == "gpu":
        return
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    config.hook.pytest_deselected(items=on_gpu)
    items[:] = [item for item in items if item not in on_gpu]
