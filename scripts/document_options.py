"""Write docs/options.md from `srt.server_args`: `python -m scripts.document_options [--check]`.

With `--check` nothing is written; the exit status is 1 when the page is not what would be written.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from scripts.generated_page import write_or_check
from srt.server_args import GROUPS, ServerArgs

PAGE = Path(__file__).parent.parent / "docs/options.md"

HEAD = """\
# Options

Written by `make docs` from `srt/server_args.py`: do not edit. On the command line `page_size` is `--page-size`; for
`srt.Runtime` it is the keyword `page_size`. The last column tells those who come from SGLang where a default differs.
"""

# What SGLang 0.5 does without the option, where this project has an option of the same name.
SGLANG_DEFAULTS: dict[str, Any] = {
    "tokenizer_path": None,
    "load_format": "auto",
    "dtype": "auto",
    "context_length": None,
    "revision": None,
    "download_dir": None,
    "json_model_override_args": "{}",
    "served_model_name": (),
    "chat_template": None,
    "sampling_defaults": "model",
    "tool_call_parser": "no parser",
    "reasoning_parser": "no parser",
    "tool_strict_level": "auto",
    "host": "127.0.0.1",
    "port": 30000,
    "api_key": None,
    "tokenizer_worker_num": 1,
    "stream_interval": 1,
    "incremental_streaming_output": False,
    "enable_cache_report": False,
    "mem_fraction_static": None,
    "max_total_tokens": None,
    "max_running_requests": "by memory",
    "max_queued_requests": "no limit",
    "chunked_prefill_size": "by GPU memory",
    "page_size": "1, or what the backend needs",
    "schedule_policy": "fcfs",
    "disable_radix_cache": False,
    "disable_overlap_schedule": False,
    "tp_size": 1,
    "device": None,
    "base_gpu_id": 0,
    "attention_backend": None,
    "random_seed": None,
    "disable_custom_all_reduce": False,
    "dist_timeout": "that of PyTorch",
    "watchdog_timeout": 300.0,
    "log_level": "info",
    "admin_api_key": None,
    "enable_metrics": "no /metrics at all without it",
    "ssl_certfile": None,
    "ssl_keyfile": None,
    "ssl_keyfile_password": None,
    "log_requests": False,
    "log_requests_level": 2,
    "decode_log_interval": 40,
}


def render() -> str:
    """The page: one table for each group of options."""
    parts = [HEAD]
    group = None
    for field in sorted(dataclasses.fields(ServerArgs), key=lambda field: GROUPS.index(field.metadata["group"])):
        if field.metadata["group"] != group:
            group = field.metadata["group"]
            parts.append(f"\n## {group}\n\n| option | default | meaning | in SGLang |\n|---|---|---|---|\n")
        parts.append(_row(field))
    return "".join(parts)


def _row(field: dataclasses.Field[Any]) -> str:
    names = [field.name, *field.metadata["aliases"]]
    meaning = field.metadata["help"]
    if field.metadata["choices"]:
        meaning += ": " + ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
    theirs = SGLANG_DEFAULTS.get(field.name, field.default)
    cells = [", ".join(f"`{name}`" for name in names), _show(field.default), meaning]
    cells.append("" if theirs == field.default else _show(theirs))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _show(value: Any) -> str:
    match value:
        case None | () | "":
            return ""
        case bool():
            return "on" if value else "off"
        case str() if " " in value:
            return value
        case _:
            return f"`{value}`"


if __name__ == "__main__":
    raise SystemExit(write_or_check(PAGE, render(), "srt/server_args.py says"))
