"""Everything in one command: `python -m recipes.tiny` trains both models, and evaluates what has come of it."""

from __future__ import annotations

import sys

from recipes.tiny import evaluate, train


def main() -> None:
    """The arguments are those of `recipes.tiny.train`, without a choice of folders: what is shipped is made anew."""
    train.main(sys.argv[1:])
    evaluate.main(["--write", str(train.RESULTS / "evaluation.md")])


if __name__ == "__main__":
    main()
