"""Writes srt/sampling/foreign_table.py: the request fields of SGLang, vLLM, and OpenAI's and Anthropic's clients, read from their sources.

    python -m scripts.read_request_fields sglang=FOLDER vllm=FOLDER vllm=FOLDER openai=FOLDER anthropic=FOLDER

A folder is an unpacked wheel (`pip download --no-deps vllm==0.24.0; unzip -q vllm-*.whl -d FOLDER`); a package may have several
versions. The sources are parsed, never imported: what they import is heavy. `--check` only compares.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent.parent / "srt" / "sampling" / "foreign_table.py"
HEAD = '''\
"""Request fields that other servers and clients define, by family of endpoints: package -> its defaults, one per version.

This list decides nothing: foreign_fields.py says what becomes of a field. `()`: a field without a fixed default. The list is written by
scripts/read_request_fields.py.
"""

# fmt: off
from __future__ import annotations

from typing import Any

'''

SGLANG_IO, SGLANG_OPENAI = "sglang/srt/managers/io_struct.py", "sglang/srt/entrypoints/openai/protocol.py"
VLLM_OPENAI, VLLM_TOKENS = "vllm/entrypoints/openai", "vllm/entrypoints/serve/tokenize/protocol.py"
VLLM_BASES = ("vllm/entrypoints/generate/base/protocol.py", "vllm/entrypoints/openai/engine/protocol.py")
VLLM_LORA = "vllm/entrypoints/serve/lora/protocol.py"
VLLM_MESSAGES = ("vllm/renderers/chat_utils/types.py", "vllm/entrypoints/chat_utils.py")
ANTHROPIC = ("anthropic/types", "anthropic/types/beta")
OPENAI_CHAT, ROLES = "openai/types/chat/chat_completion", ("System", "Developer", "User", "Assistant")
# family -> package -> (file, class), or several files where it moved from one to another between versions.
Source = tuple[str | tuple[str, ...], str]
SOURCES: Mapping[str, Mapping[str, tuple[Source, ...]]] = {
    "native": {"sglang": ((SGLANG_IO, "GenerateReqInput"),)},
    "sampling_params": {
        "sglang": (("sglang/srt/sampling/sampling_params.py", "SamplingParams"),),
        "vllm": (("vllm/sampling_params.py", "SamplingParams"),),
    },
    "completions": {
        "sglang": ((SGLANG_OPENAI, "CompletionRequest"),),
        "vllm": ((f"{VLLM_OPENAI}/completion/protocol.py", "CompletionRequest"),),
        "openai": (
            ("openai/types/completion_create_params.py", "CompletionCreateParamsBase"),
            ("openai/types/completion_create_params.py", "CompletionCreateParamsStreaming"),
        ),
    },
    "chat": {
        "sglang": ((SGLANG_OPENAI, "ChatCompletionRequest"),),
        "vllm": ((f"{VLLM_OPENAI}/chat_completion/protocol.py", "ChatCompletionRequest"),),
        "openai": (
            ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsBase"),
            ("openai/types/chat/completion_create_params.py", "CompletionCreateParamsStreaming"),
        ),
    },
    "responses": {
        "sglang": ((SGLANG_OPENAI, "ResponsesRequest"),),
        "vllm": ((f"{VLLM_OPENAI}/responses/protocol.py", "ResponsesRequest"),),
        "openai": (
            ("openai/types/responses/response_create_params.py", "ResponseCreateParamsBase"),
            ("openai/types/responses/response_create_params.py", "ResponseCreateParamsStreaming"),
        ),
    },
    "message": {
        "sglang": ((SGLANG_OPENAI, "ChatCompletionMessageGenericParam"),),
        "vllm": ((VLLM_MESSAGES, "CustomChatCompletionMessageParam"),),
        "openai": (
            *(
                (f"{OPENAI_CHAT}_{role.lower()}_message_param.py", f"ChatCompletion{role}MessageParam")
                for role in ROLES
            ),
            (f"{OPENAI_CHAT}_message.py", "ChatCompletionMessage"),  # an answer, which clients send back
        ),
    },
    "text_part": {
        "sglang": ((SGLANG_OPENAI, "ChatCompletionMessageContentTextPart"),),
        "openai": ((f"{OPENAI_CHAT}_content_part_text_param.py", "ChatCompletionContentPartTextParam"),),
    },
    "stream_options": {
        "sglang": ((SGLANG_OPENAI, "StreamOptions"),),
        "vllm": ((VLLM_BASES, "StreamOptions"),),
        "openai": ((f"{OPENAI_CHAT}_stream_options_param.py", "ChatCompletionStreamOptionsParam"),),
    },
    "profile": {"sglang": ((SGLANG_IO, "ProfileReq"),)},
    "abort": {"sglang": ((SGLANG_IO, "AbortReq"),)},
    "pause": {"sglang": ((SGLANG_IO, "PauseGenerationReqInput"),)},
    "continue": {"sglang": ((SGLANG_IO, "ContinueGenerationReqInput"),)},
    "update_weights_from_disk": {"sglang": ((SGLANG_IO, "UpdateWeightFromDiskReqInput"),)},
    "init_weights_update_group": {"sglang": ((SGLANG_IO, "InitWeightsUpdateGroupReqInput"),)},
    "update_weights_from_distributed": {"sglang": ((SGLANG_IO, "UpdateWeightsFromDistributedReqInput"),)},
    "destroy_weights_update_group": {"sglang": ((SGLANG_IO, "DestroyWeightsUpdateGroupReqInput"),)},
    "release_memory_occupation": {"sglang": ((SGLANG_IO, "ReleaseMemoryOccupationReqInput"),)},
    "resume_memory_occupation": {"sglang": ((SGLANG_IO, "ResumeMemoryOccupationReqInput"),)},
    "weights_checker": {"sglang": ((SGLANG_IO, "CheckWeightsReqInput"),)},
    "get_weights_by_name": {"sglang": ((SGLANG_IO, "GetWeightsByNameReqInput"),)},
    "update_weight_version": {"sglang": ((SGLANG_IO, "UpdateWeightVersionReqInput"),)},
    "load_lora_adapter": {
        "sglang": ((SGLANG_IO, "LoadLoRAAdapterReqInput"),),
        "vllm": ((VLLM_LORA, "LoadLoRAAdapterRequest"),),
    },
    "unload_lora_adapter": {
        "sglang": ((SGLANG_IO, "UnloadLoRAAdapterReqInput"),),
        "vllm": ((VLLM_LORA, "UnloadLoRAAdapterRequest"),),
    },
    "freeze_gc": {"sglang": ((SGLANG_IO, "FreezeGCReq"),)},
    "logging": {"sglang": ((SGLANG_IO, "ConfigureLoggingReq"),)},
    "tokenize": {
        "sglang": ((SGLANG_OPENAI, "TokenizeRequest"),),
        "vllm": ((VLLM_TOKENS, "TokenizeCompletionRequest"), (VLLM_TOKENS, "TokenizeChatRequest")),
    },
    "detokenize": {
        "sglang": ((SGLANG_OPENAI, "DetokenizeRequest"),),
        "vllm": ((VLLM_TOKENS, "DetokenizeRequest"),),
    },
    "parse_calls": {"sglang": ((SGLANG_IO, "ParseFunctionCallReq"),)},
    "separate_reasoning": {"sglang": ((SGLANG_IO, "SeparateReasoningReqInput"),)},
    "embeddings": {
        "sglang": ((SGLANG_OPENAI, "EmbeddingRequest"),),
        "openai": (("openai/types/embedding_create_params.py", "EmbeddingCreateParams"),),
    },
    "encode": {"sglang": ((SGLANG_IO, "EmbeddingReqInput"),)},
    "rerank": {"sglang": ((SGLANG_OPENAI, "V1RerankReqInput"),)},
    "score": {"sglang": ((SGLANG_OPENAI, "ScoringRequest"),)},
    "messages": {
        "anthropic": tuple(
            (f"{folder}/message_create_params.py", f"MessageCreateParams{which}")
            for folder in ANTHROPIC
            for which in ("Base", "Streaming")
        ),
    },
    "count_tokens": {
        "anthropic": tuple(
            (f"{folder}/message_count_tokens_params.py", "MessageCountTokensParams") for folder in ANTHROPIC
        ),
    },
}
# Bases of request classes that bring no fields, where they are not in the package itself.
FIELDLESS = frozenset(("BaseModel", "TypedDict", "Struct", "PydanticMsgspecMixin"))
FACTORIES: Mapping[str, Callable[[], Any]] = {"list": list, "dict": dict, "set": list}
OPERATORS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.LShift: operator.lshift,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
WIDTH = 120
NOT_FIXED = object()  # a required field, or one whose default is computed


@cache
def _parsed(path: Path) -> list[ast.stmt]:
    return ast.parse(path.read_text("utf-8")).body


@dataclass(frozen=True)
class Module:
    """One parsed source file within an unpacked package."""

    root: Path
    path: str

    @property
    def body(self) -> list[ast.stmt]:
        return _parsed(self.root / self.path)

    def find(self, name: str) -> tuple[Module, ast.ClassDef | ast.expr] | None:
        """The class or the value that `name` means here, with the module that defines it. None: from elsewhere."""
        for node in self.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                return self, node
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                return self, node.value
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                return None if node.value is None else (self, node.value)
            if isinstance(node, ast.ImportFrom) and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._imported(node.module or "", alias.name)
        return None

    def _imported(self, module: str, name: str) -> tuple[Module, ast.ClassDef | ast.expr] | None:
        path = module.replace(".", "/")
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if (self.root / candidate).is_file():
                return Module(self.root, candidate).find(name)
        return None


def fields_of(module: Module, name: str) -> dict[str, Any]:
    """The fields of a request class, those of its bases first, each with its default or NOT_FIXED."""
    found = module.find(name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        raise SystemExit(f"{module.path} has no class {name}")
    module, node = found[0], found[1]
    fields: dict[str, Any] = {}
    for base in node.bases:
        called = base.attr if isinstance(base, ast.Attribute) else ast.unparse(base)
        if called not in FIELDLESS:
            fields |= fields_of(module, called)
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            field, kind = part.target.id, ast.unparse(part.annotation)
            if not field.startswith("_") and not kind.startswith("ClassVar"):
                fields[field] = NOT_FIXED if part.value is None else default_of(module, part.value)
    return fields


def default_of(module: Module, value: ast.expr) -> Any:
    """What a field is when a client leaves it out, where that can be read off the source."""
    match value:
        case ast.Call(func=ast.Name(id="Field" | "field") | ast.Attribute(attr="field")):
            given = {word.arg: word.value for word in value.keywords}
            if "default_factory" in given:
                factory = FACTORIES.get(ast.unparse(given["default_factory"]))
                return NOT_FIXED if factory is None else factory()
            default = given.get("default", value.args[0] if value.args else None)
            return NOT_FIXED if default is None else default_of(module, default)
        case ast.Constant(value=constant):
            return NOT_FIXED if constant is Ellipsis else constant
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -default_of(module, operand)
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](default_of(module, left), default_of(module, right))
        case ast.List(elts=[]) | ast.Dict(keys=[]):
            return ast.literal_eval(value)
        case ast.Name(id=name):
            return _named(module, name, value)
        case ast.Attribute(value=ast.Name(id=name), attr=member):
            return _member(module, name, member)
    raise SystemExit(f"{module.path}: cannot read the default {ast.unparse(value)}")


def _named(module: Module, name: str, value: ast.expr) -> Any:
    found = module.find(name)
    if found is None or isinstance(found[1], ast.ClassDef):
        raise SystemExit(f"{module.path}: cannot read the default {ast.unparse(value)}")
    return default_of(found[0], found[1])


def _member(module: Module, name: str, member: str) -> Any:
    """The value of an enum's member, which is how JSON has it."""
    found = module.find(name)
    for node in found[1].body if found is not None and isinstance(found[1], ast.ClassDef) else []:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == member:
            return ast.literal_eval(node.value)
    raise SystemExit(f"{module.path}: cannot read the default {name}.{member}")


def read(root: Path, sources: tuple[Source, ...]) -> dict[str, list[Any]]:
    """field -> its fixed defaults in these classes of one version."""
    fields: dict[str, list[Any]] = {}
    for where, name in sources:
        paths = (where,) if isinstance(where, str) else where
        modules = [Module(root, path) for path in paths if (root / path).is_file()]
        holder = next((one for one in modules if one.find(name) is not None), None)
        if holder is None:
            raise SystemExit(f"{root}: no class {name} in {' or '.join(paths)}")
        for field, default in fields_of(holder, name).items():
            known = fields.setdefault(field, [])
            if default is not NOT_FIXED and repr(default) not in map(repr, known):
                known.append(default)
    return fields


def version_of(root: Path, package: str) -> str:
    """As the wheel's metadata folder is named."""
    found = sorted(root.glob(f"{package}-*.dist-info"))
    if len(found) != 1:
        raise SystemExit(f"{root}: expected one {package}-VERSION.dist-info, found {len(found)}")
    return found[0].name.removeprefix(f"{package}-").removesuffix(".dist-info")


def render(folders: list[tuple[str, Path]]) -> str:
    """The whole generated module."""
    versions: dict[str, tuple[str, ...]] = {}
    for package, root in folders:
        versions[package] = (*versions.get(package, ()), version_of(root, package))
    families: dict[str, dict[str, dict[str, tuple[Any, ...]]]] = {}
    for family, packages in SOURCES.items():
        table = families.setdefault(family, {})
        for package, root in folders:
            for field, defaults in read(root, packages.get(package, ())).items():
                known = table.setdefault(field, {}).get(package, ())
                table[field][package] = (*known, *(one for one in defaults if repr(one) not in map(repr, known)))
    return written(versions, families)


def written(
    versions: Mapping[str, tuple[str, ...]], families: Mapping[str, Mapping[str, Mapping[str, tuple[Any, ...]]]]
) -> str:
    """The module that has these tables, with as many fields in a line as fit."""
    lines = [HEAD, "VERSIONS: dict[str, tuple[str, ...]] = {\n"]
    lines += [f'    "{package}": {_written(found)},\n' for package, found in versions.items()]
    lines.append("}\nFIELDS: dict[str, dict[str, dict[str, tuple[Any, ...]]]] = {\n")
    for family, table in families.items():
        lines.append(f'    "{family}": {{\n')
        lines += _packed([f'"{field}": {_written(dict(by))},' for field, by in sorted(table.items())])
        lines.append("    },\n")
    return "".join([*lines, "}\n"])


def _packed(entries: list[str]) -> list[str]:
    """The entries in lines of at most WIDTH characters."""
    lines: list[str] = []
    for entry in entries:
        if lines and len(lines[-1]) + len(entry) + 1 <= WIDTH:
            lines[-1] += f" {entry}"
        else:
            lines.append(f"        {entry}")
    return [f"{line}\n" for line in lines]


def _written(value: Any) -> str:
    return repr(value).replace("'", '"')


def main(arguments: list[str]) -> int:
    """Write the table, or compare it."""
    folders = [(package, Path(folder)) for package, _, folder in (one.partition("=") for one in arguments) if folder]
    if {package for package, _ in folders} != {"sglang", "vllm", "openai", "anthropic"}:
        print(__doc__, file=sys.stderr)
        return 2
    text = render(folders)
    if "--check" not in arguments:
        TABLE.write_text(text, "utf-8")
        return 0
    if TABLE.read_text("utf-8") == text:
        return 0
    print(f"{TABLE} is not what these packages say", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
