"""Resources of a compiled Triton kernel, reported by the compiler without a GPU.

    used = resources(kernel, types, constants, {"num_warps": 8}, capability=90, folder=tmp_path)
    used["REG"], used["STACK"], used["SHARED"]

STACK is the size of spilled registers. Needs Triton: `make test-kernels`.
"""

import re
import subprocess
from pathlib import Path
from typing import Any


def resources(
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, Any],
    capability: int,
    folder: Path,
) -> dict[str, int]:
    """Compile the kernel; arguments that are in neither `types` nor `constants` are strides."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned: Any = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if signature[name][0] in "*i"}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, aligned)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    path = folder / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    output = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    usage = {name: int(count) for name, count in re.findall(r"(REG|STACK):(\d+)", output)}
    return usage | {"SHARED": compiled.metadata.shared}
