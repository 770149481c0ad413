"""How a kernel is compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER: Final = GPUTarget("cuda", 90, 32)
TYPE_NAMES: Final = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8e4nv"
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelBuild:
    """One kernel with the types of its arguments and the values of its constants."""

    name: str
    kernel: Any
    types: dict[str, str]  # of every argument that is not a constant
    constants: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    def compile(self, target: GPUTarget = HOPPER) -> Any:
        """Triton's CompiledKernel, down to the target's machine code; no GPU is touched."""
        signature = {name: self.types.get(name, "constexpr") for name in self.kernel.arg_names}
        missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in self.constants]
        assert not missing, f"{self.name}: neither a type nor a value for {missing}"
        # What Triton finds at a real launch: aligned tensors, and strides of whole heads.
        aligned = [
            kind.startswith("*") or name.endswith(("token_stride", "location_stride", "row_stride"))
            for name, kind in signature.items()
        ]
        attrs = {(index,): [["tt.divisibility", 16]] for index, is_aligned in enumerate(aligned) if is_aligned}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attrs)
        return triton.compile(source, target=target, options=self.options)
