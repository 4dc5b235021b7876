"""The kernels as a GPU would run them: Triton's compiler needs none, and tells what they take of a multiprocessor."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.compiled

CAPABILITIES = [80, 90]
"""An A100's and an H100's."""


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_kernels_of_the_head_compile_and_keep_to_registers(capability: int, dtype: str, tmp_path: Path):
    from camshaft.models import tile_kernels as kernels

    common = {"logits": "*fp32", "columns": "*i64", "num_tokens": "i32", "num_words": "i32", "temperature": "fp32"}
    cases = [
        (kernels._look, common | {"found": "*fp32"}, {"ENTROPY": True}),
        (kernels._slope, common | {"about": "*fp32", "grad": f"*{dtype}"}, {}),
    ]
    for kernel, types, constants in cases:
        used = resources(kernel, types, {**constants, "BLOCK": kernels.WORDS}, kernels.WARPS, capability, tmp_path)
        # 65536 registers of a multiprocessor, and two programs at a time at least: one loads while the other computes.
        assert used["STACK"] == 0, used
        assert used["REG"] * 32 * kernels.WARPS <= 65536 // 2, used


def resources(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], warps: int, capability: int, folder: Path
) -> dict[str, int]:
    """What `cuobjdump` says of a kernel; STACK is what does not find room in registers."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(kernel, order, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    told = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|SHARED):(\d+)", told)}
