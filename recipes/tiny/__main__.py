"""Everything in one command: `python -m recipes.tiny` trains both models and the head, and evaluates what has come of it."""

from __future__ import annotations

import sys

from recipes.tiny import eagle3, evaluate, train


def main() -> None:
    """The arguments are those of `recipes.tiny.train`, without a choice of folders: what is shipped is made anew."""
    train.main(sys.argv[1:])
    eagle3.main([])
    evaluate.main(["--write", str(train.RESULTS / "evaluation.md")])


if __name__ == "__main__":
    main()
