"""Write a tokenizer.json for a checkpoint that has none, using `transformers` in a separate process to keep the caller small.

    python -m srt.utils.convert_tokenizer CHECKPOINT TARGET_FILE

Exits with code 1 and one line on stderr if the tokenizer cannot be converted.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: str, target: str) -> None:
    """Convert the tokenizer in `folder`. `target` appears complete or not at all, even if several processes write it at once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} has no fast form")
    partial = Path(f"{target}.{os.getpid()}")
    backend.save(str(partial))
    partial.rename(target)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:  # the caller shows the foreign library's message as the reason
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        sys.exit(1)
