"""All families, by the architecture that config.json names."""

from __future__ import annotations

from srt.utils.families.cohere2 import COHERE2
from srt.utils.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from srt.utils.families.family import Family
from srt.utils.families.gemma import GEMMA2, GEMMA3
from srt.utils.families.glm4 import GLM4, GLM4_MOE
from srt.utils.families.gpt_oss import GPT_OSS
from srt.utils.families.granite import GRANITE, GRANITE_MOE
from srt.utils.families.llama import LLAMA, MISTRAL
from srt.utils.families.mixtral import MIXTRAL
from srt.utils.families.olmo import OLMO2, OLMO3, OLMOE
from srt.utils.families.phi3 import PHI3
from srt.utils.families.qwen import QWEN2, QWEN3
from srt.utils.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from srt.utils.families.smollm3 import SMOLLM3
from srt.utils.model_error import ModelError

FAMILIES = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        PHI3,
        SMOLLM3,
        GRANITE,
        OLMO2,
        OLMO3,
        GLM4,
        COHERE2,
        GEMMA2,
        GEMMA3,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        OLMOE,
        GRANITE_MOE,
        GLM4_MOE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}


def family_of(architecture: str) -> Family:
    """Return the family; raise ModelError for an architecture that is not supported."""
    family = FAMILIES.get(architecture)
    if family is None:
        supported = ", ".join(FAMILIES)
        raise ModelError(f"The model architecture {architecture} is not supported; supported are {supported}.")
    return family
