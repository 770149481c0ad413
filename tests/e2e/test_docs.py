"""Every command of README.md and docs/**/*.md is run here, or is marked as not run, with the reason, and counted.

In a page, ```sh and ```python are run; the other languages are only shown. The line before a block may say how:

    <!-- not run: why -->      <!-- run: server -->  (started, waited for, stopped with Ctrl-C)

localhost:30000 is the server of these tests.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from srt.cli import chat, generate
from srt.cli import main as cli
from srt.server_args import make_parser
from tests.e2e.conftest import Server
from tests.support.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.e2e

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = {"text", "json", "jinja", "toml", "ini", "yaml", "html", "http", "diff", "promql", "nginx"}
DIRECTIVE = re.compile(r"<!-- (not run: \S.*|run: server) -->")
ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):30000")
BLOCK_S = 120


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    directive: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in ("sh", "python") and not self.directive.startswith("not run")

    @property
    def commands(self) -> list[str]:
        """Of a shell block: one each, however many lines it has. A program counts as one."""
        if self.language == "python":
            return [self.text]
        commands, part = [], ""
        for line in self.text.splitlines():
            part += line + "\n"
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a quotation goes on
                continue
            if not line.endswith("\\"):
                commands += [part] if words else []
                part = ""
        assert not part.strip(), f"{self}: {part!r} does not end"
        return commands


def blocks_of(page: Path) -> list[Block]:
    blocks, before = [], ""
    lines = enumerate(page.read_text("utf-8").splitlines(), start=1)
    for number, line in lines:
        if opening := re.fullmatch(r"( *)```(\S*).*", line):
            inside = []
            for _, line_inside in lines:
                if line_inside.strip() == "```":
                    break
                inside.append(line_inside.removeprefix(opening[1]))
            directive = DIRECTIVE.fullmatch(before.strip())
            blocks.append(Block(page, number, opening[2], "\n".join(inside), directive[1] if directive else ""))
        before = line if line.strip() else before
    return blocks


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUN = [block for block in BLOCKS if block.is_run]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of somebody who has installed srt; a curl that fails when a request does."""
    home = tmp_path_factory.mktemp("home")
    for name, words in (("srt", "-m srt"), ("python", "")):
        script = home / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
        script.chmod(0o755)
    (home / ".curlrc").write_text("fail-with-body\nshow-error\n")
    return {
        **os.environ,
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "CURL_HOME": str(home),
        "TMPDIR": str(tmp_path_factory.mktemp("docs")),
    }


@pytest.mark.parametrize("block", [block for block in RUN if block.directive == ""], ids=str)
def test_what_a_page_says_to_run_works(block: Block, tiny_server: Server, surroundings: dict[str, str]) -> None:
    text = ADDRESS.sub(tiny_server.url.removeprefix("http://"), block.text)
    shell = ["bash", "-euo", "pipefail", "-c", text]
    command = shell if block.language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BLOCK_S, cwd=ROOT, env=surroundings)
    assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
    assert done.stdout, f"{block} prints nothing, so a reader cannot tell whether it worked"


@pytest.mark.parametrize("block", [block for block in RUN if block.directive == "run: server"], ids=str)
def test_a_server_that_a_page_says_to_start_starts(block: Block, tmp_path: Path) -> None:
    for command in block.commands:
        words = shlex.split(command)
        module, rest = ("srt", words[1:]) if words[0] == "srt" else (words[2], words[3:])
        rest = [word for at, word in enumerate(rest) if "--port" not in (word, rest[at - 1] if at else "")]
        with ServerProcess(module, [*rest, "--port", "0"], tmp_path) as server:
            server.wait_ready()
            server.send(signal.SIGINT)
            assert server.wait() == 0, server.lines


def test_every_block_is_run_or_shown_or_has_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = [
        f"{block} ({block.language or 'no language'})"
        for block in BLOCKS
        if block.language not in SHOWN | {"sh", "python"}
    ]
    assert unknown == [], f"say what they are: sh and python are run, {', '.join(sorted(SHOWN))} are shown"
    programs = [block for block in RUN if block.language == "python"]
    commands = sum(len(block.commands) for block in RUN if block.language == "sh")
    left_out = [block for block in BLOCKS if block.directive.startswith("not run")]
    with capsys.disabled():
        print(f"\ndocumentation: {commands} commands and {len(programs)} programs run, ", end="")
        print(f"{sum(len(block.commands) for block in left_out)} not run:")
        for block in left_out:
            print(f"  {block}: {len(block.commands)}, {block.directive.removeprefix('not run: ')}")
    assert commands >= 10


def test_every_mark_stands_before_a_block() -> None:
    marks = sum(len(re.findall(r"^ *<!-- (?:not )?run\b", page.read_text("utf-8"), re.MULTILINE)) for page in PAGES)
    assert marks == sum(bool(block.directive) for block in BLOCKS)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_hides_in_an_indented_block(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    starts = re.findall(r"(?:^|\n)\n {4}(\S+) \S.*", text)
    commands = [word for word in starts if word == "srt" or (shutil.which(word) and not word[0].isupper())]
    assert commands == [], "fence it as sh, so that it is run"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_named_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    (targets,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    for command in re.findall(r"`((?:make|srt|python -m) [^`]+)`", text):
        match command.split():
            case ["make", target, *_]:
                assert target in targets.split(), command
            case ["srt", name, *_]:
                assert name in cli.COMMANDS or name == "--version", command
            case ["python", "-m", module, *_]:
                assert importlib.util.find_spec(module) is not None, command


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "usage.md"], ids=name_of)
def test_options_named_in_the_first_pages_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    known = make_parser().format_help()
    for name in set(re.findall(r"`(--[a-z][a-z-]*)", text)):
        assert f"{name} " in known or f"{name}," in known or f"{name}\n" in known or name == "--help", name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path) if path else page
            assert linked.exists(), f"{page.name}: {target}"
            if anchor and linked.suffix == ".md":
                titles = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}, target


@pytest.mark.parametrize("main", [chat.main, generate.main])
def test_the_examples_of_the_help_name_what_exists(main: object, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main)
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for module in re.findall(r"python -m (srt\.\w+)", text):
        assert importlib.util.find_spec(module) is not None
    for name in re.findall(r"^  (?:python|echo).*?(--[a-z-]+)", text, re.MULTILINE):
        assert f"  {name}" in text.split("examples:")[0]
