"""How a kernel is compiled without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

HOPPER: Final = 90
FIRST_WITH_FP8: Final = 89
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

    def can_be_for(self, capability: int) -> bool:
        """float8_e4m3fn is a type of GPUs from 8.9 on."""
        return capability >= FIRST_WITH_FP8 or not any("fp8" in kind for kind in self.types.values())

    def compile(self, capability: int) -> Any:
        """Triton's CompiledKernel, down to the machine code of GPUs of that compute capability; no GPU is touched."""
        constants, options = self.constants, self.options
        if capability < HOPPER:  # where kernels are launched one after the other
            constants = {**constants, "PDL": False} if "PDL" in constants else constants
            options = {name: value for name, value in options.items() if name != "launch_pdl"}
        signature = {name: self.types.get(name, "constexpr") for name in self.kernel.arg_names}
        missing = [name for name, kind in signature.items() if kind == "constexpr" and name not in constants]
        assert not missing, f"{self.name}: neither a type nor a value for {missing}"
        # What Triton finds at a real launch: aligned tensors, and strides of whole heads.
        aligned = [
            kind.startswith("*") or name.endswith(("token_stride", "location_stride", "row_stride"))
            for name, kind in signature.items()
        ]
        attrs = {(index,): [["tt.divisibility", 16]] for index, is_aligned in enumerate(aligned) if is_aligned}
        source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attrs)
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
