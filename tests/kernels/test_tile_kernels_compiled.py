"""The Triton kernels of the fused output head, compiled for GPUs; the compiler runs without a GPU."""

from pathlib import Path

import pytest
from support.compiled import resources

pytestmark = pytest.mark.compiled

CAPABILITIES = [80, 90]
"""Compute capabilities of A100 and H100."""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_of_the_head_compile_and_keep_to_registers(capability: int, dtype: str, tmp_path: Path):
    from camshaft.models.triton import linear_logprob as kernels

    sizes = {"num_tokens": "i32", "vocabulary_size": "i32"}
    common = {"logits": "*fp32", "columns": "*i64", **sizes, "temperature": "fp32"}
    cases = [
        *(
            (kernels._reduce_kernel, common | {"results": "*fp32"}, {"ENTROPY": True, "SQUARES": squares})
            for squares in (False, True)
        ),
        (kernels._gradient_kernel, common | {"statistics": "*fp32", "grad": f"*{dtype}"}, {}),
    ]
    for kernel, types, constants in cases:
        constants = {**constants, "BLOCK": kernels.BLOCK_SIZE}
        used = resources(kernel, types, constants, {"num_warps": kernels.WARPS}, capability, tmp_path)
        # A multiprocessor has 65536 registers and runs at least two programs: one loads while the other computes.
        assert used["STACK"] == 0, used
        assert used["REG"] * 32 * kernels.WARPS <= 65536 // 2, used
