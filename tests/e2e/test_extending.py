"""The recipes of docs/extending.md, each carried out on a copy of the project as its example says, and used there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server_process import ROOT

pytestmark = pytest.mark.e2e

PAGE = ROOT / "docs" / "extending.md"
COPIED = ("srt", "scripts", "tests")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "compiled", "assets")

USES = {
    "A model": """
from pathlib import Path
from tests.support.checkpoints import CheckpointFactory
from tests.unit.models.test_models_match_transformers import assert_same_logits
checkpoint = CheckpointFactory(Path("checkpoints"))
for has_bias in (True, False):
    assert_same_logits(checkpoint("seed_oss", config={"attention_bias": has_bias}), f"bias: {has_bias}")
""",
    "An attention backend": """
import torch
from srt.layers.attention.backend_choice import choose_backends, make_backend
from srt.server_args import parse_args
from srt.utils.errors import StartError
from tests.unit.layers.attention.attention_world import AttentionWorld, spec_of
cpu, args = torch.device("cpu"), parse_args(["--model-path", "x", "--attention-backend", "dense"])
for window in (None, 7):
    spec = spec_of(2, 16, 16, torch.float32, window)
    backend = make_backend(choose_backends(args, spec, cpu), spec, cpu)
    world = AttentionWorld(backend, 4, 2, 16, 16, torch.float32, window=window)
    errors = [world.step([(3, 15), (0, 1)], []), world.step([(3, 40)], [0]), world.step([], [0, 3])]
    assert type(backend).__name__ == "DenseBackend" and max(errors) <= 2e-6, errors
try:
    choose_backends(args, spec_of(2, 16, 16, torch.float32, fp8=True), cpu)
except StartError as error:
    assert "the model's own type" in str(error), error
else:
    raise AssertionError("a memory that it cannot read is not refused")
""",
    "A message": """
from srt.managers.scheduler.effects import Frontend, Worker
from srt.managers.scheduler.scheduler import Scheduler
from srt.protocol.codec import decode_view, encode, protocol_hash
from srt.protocol.messages import CountWaiting, FrontendHello, WorkerHello
from srt.server_args import ServerArgs
scheduler, version = Scheduler(ServerArgs(model_path="x"), protocol_hash()), protocol_hash()
scheduler.handle(Worker(0), WorkerHello(0, version, "", "float32", 16, 64, 4, 1024, 1000), 0.0)
scheduler.handle(Frontend(0), FrontendHello(0, version), 0.0)
sent = decode_view(encode(CountWaiting(7), 1, 1)).message
(effect,) = scheduler.handle(Frontend(0), sent, 0.0)
assert (effect.message.call, effect.message.values) == (7, {"num_waiting": 0}), effect
print(version)
""",
    "An option": """
from scripts.document_options import render
from srt.server_args import ArgumentError, from_keywords, make_parser, parse_args
assert parse_args(["--model-path", "x", "--log-sample-rate", "0.5"]).log_sample_rate == 0.5
assert from_keywords({"model_path": "x", "log_sample_rate": 0.5}).log_sample_rate == 0.5
assert "--log-sample-rate" in make_parser().format_help() and "`log_sample_rate`" in render()
try:
    parse_args(["--model-path", "x", "--log-sample-rate", "2"])
except ArgumentError as error:
    assert "--log-sample-rate" in str(error), error
else:
    raise AssertionError("a value that makes no sense is not refused")
""",
}


def examples() -> dict[str, list[list[str]]]:
    """The lines of the page's examples by the titles of their recipes."""
    found: dict[str, list[list[str]]] = {}
    for section in PAGE.read_text("utf-8").split("\n## ")[1:]:
        blocks = re.findall(r"^```diff\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        if blocks:
            found[section.partition("\n")[0]] = [block.splitlines() for block in blocks]
    return found


def carry_out(example: list[str], root: Path) -> None:
    """Change one file as the example says. Each place must be there exactly once."""
    path, lines = root / example[0], example[1:]
    if all(line.startswith("+") for line in lines):
        assert not path.exists(), f"{example[0]} is there already"
        path.write_text("".join(f"{line[1:]}\n" for line in lines), "utf-8")
        return
    text = path.read_text("utf-8")
    for place in "\n".join(lines).split("\n@@\n"):
        before, after = _sides(place.splitlines())
        count = f"\n{text}".count(f"\n{before}")  # whole lines
        assert count == 1, f"{example[0]} has this {count} times:\n{before}"
        text = f"\n{text}".replace(f"\n{before}", f"\n{after}")[1:]
    path.write_text(text, "utf-8")


def _sides(lines: list[str]) -> tuple[str, str]:
    """What a place has before and after."""
    assert all(line[:1] in ("", " ", "+", "-") for line in lines), lines
    before = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("+"))
    after = "".join(f"{line[1:]}\n" for line in lines if not line.startswith("-"))
    return before, after


def run(root: Path, program: str) -> str:
    """What the program prints in that copy."""
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=root, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in COPIED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=LEFT_OUT)
    return tmp_path


@pytest.mark.parametrize("recipe", USES)
def test_a_recipe_works_as_its_example_says(recipe: str, copy: Path) -> None:
    with pytest.raises(AssertionError):
        run(copy, USES[recipe])  # what it adds is not there yet
    for example in examples()[recipe]:
        carry_out(example, copy)
    run(copy, USES[recipe])


def test_processes_with_another_message_refuse_each_other(copy: Path) -> None:
    version = "from srt.protocol.codec import protocol_hash; print(protocol_hash())"
    before = run(copy, version)
    for example in examples()["A message"]:
        carry_out(example, copy)
    assert run(copy, version) != before


def test_every_example_is_carried_out() -> None:
    assert set(examples()) == set(USES)
