"""Write a tokenizer.json for a checkpoint that has none, with `transformers`: a process of its own, so that its caller stays small.

    python -m srt.utils.convert_tokenizer CHECKPOINT TARGET_FILE

Exit code 1 and one line on stderr if it cannot be done.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(folder: str, target: str) -> None:
    """The target appears whole or not at all, whoever else writes it at the same time."""
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
    except Exception as error:  # whatever a foreign library raises is the reason that the caller shows
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        sys.exit(1)
