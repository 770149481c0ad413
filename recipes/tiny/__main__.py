"""Everything in one command: `python -m recipes.tiny` trains the models and the head, and evaluates what has come of them."""

from __future__ import annotations

import sys

from recipes.tiny import eagle3, evaluate, moe, train


def main() -> None:
    """The arguments are those of `recipes.tiny.train`, without a choice of folders: what is shipped is made anew."""
    train.main(sys.argv[1:])
    eagle3.main([])
    moe.main([])
    evaluate.main(["--write", str(train.RESULTS / "evaluation.md")])
    evaluate.main(["--model", str(moe.MODELS / "tiny-moe"), "--write", str(train.RESULTS / "moe-evaluation.md")])


if __name__ == "__main__":
    main()
