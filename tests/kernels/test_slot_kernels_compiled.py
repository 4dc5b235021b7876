"""The attention kernels of the KV cache, compiled for GPUs; the compiler runs without a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compiled import resources

pytestmark = pytest.mark.compiled

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

POINTERS = ("query", "key", "value", "cos", "sin", "rotated", "keys", "values", "sinks")


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize(
    ("dtype", "dim"), [("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp16", 80), ("fp32", 64), ("fp32", 128)]
)
def test_kernels_compile_and_keep_to_registers(
    dtype: str, dim: int, splits: int, capability: int, tmp_path: Path
) -> None:
    from camshaft.rollout.builtin.cuda import kernels

    some, sums = f"*{dtype}", "*fp32" if splits > 1 else f"*{dtype}"
    padded = kernels._tile_size(dim)
    dims = {"DIM": dim, "VALUE_DIM": dim, "DIMS": padded}
    shape = kernels.block_config(DTYPES[dtype], padded)
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages")}
    blocks = {"positions": "*i64", **dict.fromkeys(POINTERS, some)}
    heads = {"WINDOW": 0, "GROUP": 6, "PADDED_GROUP": 16, "NUM_SPLITS": splits, "LOG2E": kernels.LOG2E}
    attend = blocks | {"parts": sums, "log_sums": sums, "scale": "fp32", "cap": "fp32"}
    cases: list[tuple[Any, dict[str, str], dict[str, Any], dict[str, int]]] = [
        *((kernels._store, blocks, {"KEY_HEADS": 2, "ROTATE": rotate, **dims}, {}) for rotate in (False, True)),
        *(
            (kernels._attend, attend, {"CAPPED": changed, "SINKS": changed, **heads, **dims, **shape}, options)
            for changed in (False, True)
        ),
    ]
    if splits > 1:
        merge = {"VALUE_DIM": dim, "VALUE_DIMS": padded, "NUM_SPLITS": splits, "PADDED_SPLITS": splits}
        cases.append((kernels._merge, {"parts": "*fp32", "log_sums": "*fp32", "out": some}, merge, {}))
    for kernel, types, constants, chosen in cases:
        used = resources(kernel, types, constants, chosen, capability, tmp_path)
        assert used["STACK"] == 0, used  # spilled registers
        # At least two programs fit: 65536 registers, and 164 KB of shared memory on the smallest of these GPUs.
        assert used["REG"] * 32 * chosen.get("num_warps", 4) <= 65536 // 2, used
        assert used["SHARED"] <= 82 * 1024, used


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_fused_kernels_compile_without_spills(dtype: str, capability: int, tmp_path: Path) -> None:
    from camshaft.rollout.builtin.cuda import fused_kernels, sampling

    some = f"*{dtype}"
    rows = dict.fromkeys(("x", "residual", "weight", "total", "out", "gate", "up", "scores"), some)
    rows |= {"eps": "fp32", "temperature": "fp32", "scale": "fp32"}
    rows |= {"sums": "*fp32", "uniforms": "*fp64", "tokens": "*i64", "log_probs": "*fp32"}
    cases: list[tuple[Any, dict[str, Any], int]] = [
        (fused_kernels._norm_kernel, {"ADD": True, "BLOCK": 2048}, 4),
        (fused_kernels._norm_kernel, {"ADD": True, "BLOCK": 8192}, 16),
        (fused_kernels._silu_mul_kernel, {"BLOCK": fused_kernels.BLOCK_SIZE}, 4),
        (sampling._sum_blocks, {"BLOCK": sampling.BLOCK_SIZE}, 4),
        (sampling._select, {"BLOCK": sampling.BLOCK_SIZE, "BLOCKS": 128}, 4),
    ]
    for kernel, constants, warps in cases:
        used = resources(kernel, rows, constants, {"num_warps": warps}, capability, tmp_path)
        assert used["STACK"] == 0, (kernel, used)
