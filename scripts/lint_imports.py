"""`python -m scripts.lint_imports`: import-linter, which cannot be run as a module, for environments without its script."""

from __future__ import annotations

from importlinter.cli import lint_imports_command

if __name__ == "__main__":
    lint_imports_command()
