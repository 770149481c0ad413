"""Which routes need no key, and which need the admin key. `App._check_key` in app.py checks the keys of requests."""

from __future__ import annotations

from srt.entrypoints import web_page

# Routes without a key. /metrics is another one, if --enable-metrics is set.
OPEN_TO_ALL = frozenset(("/health", "/ping", "/ready", "/health_generate", *web_page.FILES))
# Routes for operators. They need the admin key, if one is set.
ADMIN = frozenset(
    (
        *("/flush_cache", "/pause_generation", "/continue_generation", "/abort_request"),
        *("/load_lora_adapter", "/unload_lora_adapter", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weight_version"),
        *("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"),
        *("/release_memory_occupation", "/resume_memory_occupation"),
        *("/weights_checker", "/get_weights_by_name", "/save_sharded_model"),
        *("/configure_logging", "/freeze_gc", "/start_profile", "/stop_profile"),
    )
)
