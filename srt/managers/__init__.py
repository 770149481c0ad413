"""The processes of a server, a folder each, and `process/`, which all of them share.

Start with `supervisor/`, which starts the others; then follow a request through `tokenizer_manager/`, `scheduler/` and `tp_worker/`.
"""
