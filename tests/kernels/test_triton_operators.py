"""The operators of Triton without a GPU: run by its interpreter, and compiled for an H100.

The interpreter knows float64, float32 and float16 (interpreted.py). The compiler must take the rest:
every kernel as a layer launches it, also in bfloat16, within the shared memory that a program may
have. Races, rounding and speed remain for a GPU.
"""

import os
import re
import subprocess
import sys

import pytest
import torch

from moe.kernels import row_operators
from moe.kernels.row_operators import RowOperators, use_row_operators
from tests.sparse.layers import THREE_SLOTS, build_layer

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from moe.kernels.triton_hidden import triton_hidden  # noqa: E402
from moe.kernels.triton_rows import triton_combine, triton_gather  # noqa: E402

pytestmark = pytest.mark.slow

SHARED_MEMORY = 227 * 1024  # bytes of a program on an H100

# Any value of one column meets any value of another in some row; and the paper's experts.
KINDS = [
    (torch.bfloat16, "gelu", True, "none", 0.1),
    (torch.bfloat16, "gelu", False, "additive", 0.1),
    (torch.bfloat16, "relu", False, "multiplicative", 0.1),
    (torch.bfloat16, "relu", True, "none", 0.0),
    (torch.float32, "gelu", False, "multiplicative", 0.0),
    (torch.float32, "gelu", True, "none", 0.1),
    (torch.float32, "relu", True, "additive", 0.0),
    (torch.float16, "gelu", False, "none", 0.0),
    (torch.float16, "relu", False, "additive", 0.0),
    (torch.float16, "relu", True, "multiplicative", 0.1),
    (torch.float64, "gelu", True, "multiplicative", 0.1),
]


def test_the_interpreter_computes_what_torch_does():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(
        [*command, "tests/kernels/interpreted.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert ended.returncode == 0, ended.stdout


class _Hopper:
    """A driver of a device that is not there: what Triton asks before it compiles."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 1 << 20  # whose compiled kernels no real device will be given

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled_kernels(monkeypatch, tmp_path):
    """Makes launches compile for an H100 and do no more; returns what they compiled."""
    kernels = []
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernels.append(run(self, *arguments, grid=grid, warmup=True, **options))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Hopper())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns that 3.10 has another default

    operators = RowOperators(triton_gather, triton_hidden, triton_combine)
    monkeypatch.setitem(row_operators._LIBRARIES, "triton", lambda x: operators)
    use_row_operators("triton")
    yield kernels
    use_row_operators(None)


@pytest.mark.parametrize(("dtype", "activation", "gated", "bias", "drop_rate"), KINDS)
def test_all_kernels_of_a_layer_compile_for_an_h100(
    dtype, activation, gated, bias, drop_rate, compiled_kernels
):
    layer = build_layer(
        d_model=1024,
        d_ff=1024,
        num_experts=3,
        activation=activation,
        gated=gated,
        expert_bias=bias,
        expert_dropout_rate=drop_rate,
        **THREE_SLOTS,
    )
    layer.to(dtype).train()
    x = torch.randn(1, 5, 1024, dtype=dtype, requires_grad=True)
    layer(x)[0].sum().backward()

    names = [kernel.metadata.name for kernel in compiled_kernels]
    gradients = ["_copy_kernel", "_product_gradient_kernel", "_sum_kernel"]
    if bias != "none":
        gradients.insert(2, "_bias_gradient_kernel")
    assert names == ["_copy_kernel", "_hidden_kernel", "_sum_kernel", *gradients]

    for kernel in compiled_kernels:
        assert_is_for_an_h100(kernel)
        reads_words = re.search(r"\bld\.global(\.\w+)*\.v[248]\.", kernel.asm["ptx"])
        assert reads_words, "numbers are read one by one"


def test_kernels_of_one_choice_and_of_odd_sizes_compile_too(compiled_kernels):
    """Triton compiles a 1 among the sizes as a constant."""
    layer = build_layer("switch", d_ff=1, gated=False, expert_bias="additive").bfloat16()
    x = torch.randn(1, 5, 7, dtype=torch.bfloat16, requires_grad=True)
    layer(x)[0].sum().backward()
    assert len(compiled_kernels) == 7
    for kernel in compiled_kernels:
        assert_is_for_an_h100(kernel)


def assert_is_for_an_h100(kernel):
    """Holds a compiled kernel to what an H100 can run, in one order of additions."""
    ptx = kernel.asm["ptx"]
    assert ".target sm_90" in ptx
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY
    assert not re.search(r"\b(atom|red)\.", ptx), "additions in any order"
