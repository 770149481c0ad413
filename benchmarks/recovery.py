"""What clients notice when a process of the server dies: its pause, its tokens, and who is served meanwhile.

    python -m benchmarks.recovery --model-path tiny --dtype float32 [--victims worker,scheduler,frontend] [any option of the server]
    python -m benchmarks.recovery --model-path qwen3-8b --load-format dummy

Starts a server with two frontends and runs --num-requests seeded streams: first undisturbed, then once per victim, which is sent SIGKILL
when a third of all tokens has come. Prints how many streams finished, how many of them with the very tokens of the undisturbed run, the
longest pause that each saw beside the time that the whole server takes to start, how long /ready said no, and when requests that were
sent right after the kill were answered. The victim `nobody` is an undisturbed run again: what differs there, differs without a death.
Fails if a stream broke that the victim did not hold, or if a token was lost or repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import numpy as np
import orjson
import psutil

from benchmarks import limits, models
from benchmarks.serving import state_of
from benchmarks.startup import ask
from srt.managers.process.child_process import MODULES

NOBODY = "nobody"
VICTIMS = (*MODULES, NOBODY)
FRONTENDS = 2  # so that the death of one is not everybody's
KILL_AT = 1 / 3  # of all tokens
NUM_NEW = 4  # requests that come right after the kill
WARM_UP = 32  # tokens of each stream
POLL_S = 0.05
FLUSH_S = 60  # to come to rest
LAST_LINES = 20
END_OF_HEAD = b"\r\n\r\n"
READY, SERVES_AGAIN = "Ready at ", "at work again after "  # what the supervisor says
FOOTER = """\
held: streams that the victim had as their frontend; they end with it. wrong: streams that finished, and lost or repeated a token.
same ids: streams that finished with the very tokens of the undisturbed run. In float32 that is all of them; in bfloat16 steps of other
rows round otherwise, which flips some draws and changes all that follow them (--victims nobody: how many without a death).
pause: the longest time between two chunks of a stream, median and most of those that finished. It holds the death being noticed, new
processes, and what ran being computed again. Its limit is a cold start of the server. /ready no: from the kill until it said 200 again;
0 if it never said anything else. whole: from the kill until the server said that it was. new: the longest that a request sent right
after the kill waited for its answer. later: the last end of a stream, compared with the undisturbed run."""


class CannotMeasure(Exception):
    """The server ended, or refuses the requests; with what it said last."""


class Server:
    """`python -m srt.launch_server`, what it says, and its processes. It is gone when the block ends."""

    def __init__(self, words: Sequence[str], folder: str) -> None:
        self._said: list[tuple[float, str]] = []  # its lines, and when they came
        self._news = threading.Condition()
        self._is_over = False
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "srt.launch_server", *words],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": folder},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._popen.terminate()
        self._popen.wait()
        self._reader.join()
        assert self._popen.stderr is not None
        self._popen.stderr.close()

    def _read(self) -> None:
        assert self._popen.stderr is not None
        for line in self._popen.stderr:
            with self._news:
                self._said.append((time.monotonic(), line.rstrip("\n")))
                self._news.notify_all()
        with self._news:
            self._is_over = True
            self._news.notify_all()

    @property
    def is_over(self) -> bool:
        return self._is_over or self._popen.poll() is not None

    def lines_with(self, text: str) -> list[tuple[float, str]]:
        """And when they came."""
        return [one for one in list(self._said) if text in one[1]]

    def wait_for(self, text: str, count: int = 1) -> tuple[float, str]:
        """The `count`-th line that holds this text, and when it came; CannotMeasure if it does not come."""
        with self._news:
            self._news.wait_for(lambda: self._is_over or len(self.lines_with(text)) >= count)
        found = self.lines_with(text)
        if len(found) < count:
            raise CannotMeasure(f"The server has ended. {self.last_words()}")
        return found[count - 1]

    def last_words(self) -> str:
        return "\n".join(["It said last:", *(line for _, line in self._said[-LAST_LINES:])])

    def children(self, role: str) -> list[psutil.Process]:
        """Its processes with this role."""
        children = psutil.Process(self._popen.pid).children()
        return [child for child in children if child.cmdline()[-1:] == [MODULES[role]]]


@dataclass(slots=True)
class Answer:
    """What came on one stream."""

    sent_s: float
    port: int = 0  # of our end
    ids: list[int] = field(default_factory=list)
    chunks_s: list[float] = field(default_factory=list)
    is_whole: bool = True  # at each chunk as many ids had come as the server had counted
    trouble: str | None = "the connection ended"  # None: it came to its end

    @property
    def longest_gap_s(self) -> float:
        return float(np.diff(self.chunks_s).max()) if len(self.chunks_s) > 1 else 0.0

    def take(self, chunk: dict[str, Any]) -> None:
        self.ids += chunk["output_ids"]
        self.chunks_s.append(time.monotonic())
        self.is_whole &= chunk["meta_info"]["completion_tokens"] == len(self.ids)


@dataclass(slots=True)
class Load:
    """A run of all streams, and what happened to them in the middle of it."""

    answers: list[Answer]
    new: list[Answer] = field(default_factory=list)
    held: int = 0  # streams that the victim had in its hands, if it was a frontend
    killed_s: float = 0.0
    not_ready_s: float = 0.0  # until /ready said yes for good

    @property
    def finished(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.trouble is None]

    @property
    def took_s(self) -> float:
        """From the first request to the last end of a stream that came to one."""
        return max((a.chunks_s[-1] for a in self.finished), default=0.0) - min(a.sent_s for a in self.answers)

    def gap_s(self, percent: float) -> float:
        return float(np.percentile([answer.longest_gap_s for answer in self.finished] or [0.0], percent))


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one victim. Streams are counted; times are seconds."""

    victim: str
    streams: int
    finished: int
    broke: int
    held: int
    wrong: int
    same_ids: int
    pause_p50_s: float
    pause_max_s: float
    undisturbed_pause_p50_s: float
    undisturbed_pause_max_s: float
    startup_s: float
    pause_ratio: float
    not_ready_s: float
    whole_s: float
    new: int
    new_answered: int
    new_first_token_s: float
    later_s: float
    undisturbed_s: float

    @classmethod
    def of(cls, victim: str, load: Load, whole_s: float, undisturbed: Load, startup_s: float) -> Figures:
        pairs = [(a, b) for a, b in zip(load.answers, undisturbed.answers, strict=True) if a.trouble is None]
        answered = [answer for answer in load.new if answer.trouble is None and answer.chunks_s]
        return cls(
            victim=victim,
            streams=len(load.answers),
            finished=len(pairs),
            broke=len(load.answers) - len(pairs),
            held=load.held,
            wrong=sum(not a.is_whole or len(a.ids) != len(b.ids) for a, b in pairs),
            same_ids=sum(a.ids == b.ids for a, b in pairs),
            pause_p50_s=load.gap_s(50),
            pause_max_s=load.gap_s(100),
            undisturbed_pause_p50_s=undisturbed.gap_s(50),
            undisturbed_pause_max_s=undisturbed.gap_s(100),
            startup_s=startup_s,
            pause_ratio=load.gap_s(100) / startup_s,
            not_ready_s=load.not_ready_s,
            whole_s=whole_s,
            new=len(load.new),
            new_answered=len(answered),
            new_first_token_s=max((answer.chunks_s[0] - answer.sent_s for answer in answered), default=0.0),
            later_s=load.took_s - undisturbed.took_s,
            undisturbed_s=undisturbed.took_s,
        )

    @property
    def keeps_its_promise(self) -> bool:
        return self.broke <= self.held and not self.wrong and self.new_answered == self.new

    def row(self) -> str:
        counts = f"{self.finished:8} {self.broke:5} {self.held:5} {self.wrong:5} {self.same_ids:8}"
        pauses = f"{self.pause_p50_s:9.2f} {self.pause_max_s:9.2f} {self.startup_s:6.2f} {self.pause_ratio:5.2f}"
        times = f"{self.not_ready_s:9.2f} {self.whole_s:6.2f} {self.new_first_token_s:6.2f} {self.later_s:+6.2f}"
        return f"{self.victim:10} {counts} {pauses} {times}"


HEAD = (
    f"{'victim':10} {'finished':>8} {'broke':>5} {'held':>5} {'wrong':>5} {'same ids':>8} {'pause p50':>9} {'pause max':>9}"
    f" {'limit':>6} {'ratio':>5} {'/ready no':>9} {'whole':>6} {'new':>6} {'later':>6}"
)


class Bench:
    """One server, and the same requests for each run of it."""

    def __init__(self, server: Server, options: argparse.Namespace) -> None:
        self._server = server
        self._url = server.wait_for(READY)[1].split(READY)[1].split()[0]
        info = ask(f"{self._url}/server_info")
        self.startup_s: float = info["startup_time"]
        self.dtype: str = info["startup"]["children"]["worker 0"]["values"]["dtype"]
        vocab_size = ask(f"{self._url}/model_info")["vocab_size"]
        rng = np.random.default_rng(options.seed)
        prompts = rng.integers(10, min(vocab_size, 1000), (options.num_requests + NUM_NEW, options.input_len)).tolist()

        def bodies(prompts: list[list[int]], new_tokens: int) -> list[bytes]:
            return [_body(prompt, i, new_tokens, options.temperature) for i, prompt in enumerate(prompts)]

        self._new_bodies, self._bodies = bodies(prompts[:NUM_NEW], 1), bodies(prompts[NUM_NEW:], options.output_len)
        self._warm_up_bodies = bodies(prompts[NUM_NEW:], min(options.output_len, WARM_UP))
        self._num_tokens = options.num_requests * options.output_len

    def undisturbed(self) -> Load:
        """By a server that is warm."""
        asyncio.run(self._run(self._warm_up_bodies))
        while (state_of(self._url) or {}).get("num_graphs_left"):
            time.sleep(POLL_S)
        self._come_to_rest()
        load = Load(asyncio.run(self._run(self._bodies)))
        for answer in load.answers:
            if answer.trouble is not None:
                raise CannotMeasure(f"An undisturbed stream broke: {answer.trouble}. {self._server.last_words()}")
        return load

    def with_victim(self, victim: str, undisturbed: Load) -> Figures:
        """Figures of a run in which the victim dies. The server is whole again at the end."""
        self._come_to_rest()
        if victim == NOBODY:
            load = Load(asyncio.run(self._run(self._bodies)))
            return Figures.of(victim, load, 0.0, undisturbed, self.startup_s)
        num_replaced = len(self._server.lines_with(SERVES_AGAIN))
        load = asyncio.run(self._run_and_kill(victim))
        whole_s, _ = self._server.wait_for(SERVES_AGAIN, num_replaced + 1)
        return Figures.of(victim, load, whole_s - load.killed_s, undisturbed, self.startup_s)

    def _come_to_rest(self) -> None:
        """Nothing runs, and nothing is cached that an earlier run computed."""
        with urlopen(Request(f"{self._url}/flush_cache?timeout={FLUSH_S}", b""), timeout=2 * FLUSH_S):
            pass

    async def _run(self, bodies: list[bytes], notice: Callable[[int], None] = lambda _: None) -> list[Answer]:
        answers = [Answer(time.monotonic()) for _ in bodies]
        await self._follow_all(bodies, answers, notice)
        return answers

    async def _follow_all(self, bodies: list[bytes], answers: list[Answer], notice: Callable[[int], None]) -> None:
        await asyncio.gather(*(follow(self._url, body, a, notice) for body, a in zip(bodies, answers, strict=True)))

    async def _run_and_kill(self, victim: str) -> Load:
        num_come, is_time = 0, asyncio.Event()

        def notice(num_ids: int) -> None:
            nonlocal num_come
            num_come += num_ids
            if num_come >= KILL_AT * self._num_tokens:
                is_time.set()

        load = Load([Answer(time.monotonic()) for _ in self._bodies])
        chosen = self._server.children(victim)[0]
        streams = asyncio.create_task(self._follow_all(self._bodies, load.answers, notice))
        streams.add_done_callback(lambda _: is_time.set())  # if they broke before
        await is_time.wait()
        if victim == "frontend":
            chosen, ports = await asyncio.to_thread(self._frontend_of_fewest, load.answers)
            load.held = sum(answer.port in ports and answer.trouble is not None for answer in load.answers)
        os.kill(chosen.pid, signal.SIGKILL)
        load.killed_s = time.monotonic()
        if victim == "frontend":  # whom it accepts while it dies, it takes along
            await asyncio.to_thread(psutil.wait_procs, [chosen])
        not_ready = self._not_ready_s(load.killed_s, streams)
        load.new, load.not_ready_s, _ = await asyncio.gather(self._run(self._new_bodies), not_ready, streams)
        return load

    def _frontend_of_fewest(self, answers: list[Answer]) -> tuple[psutil.Process, set[int]]:
        """Of those that have clients; and our ends of its connections."""
        open_ports = {answer.port for answer in answers if answer.trouble is not None}
        found = []
        for child in self._server.children("frontend"):
            ports = {one.raddr.port for one in child.net_connections("tcp") if one.raddr} & open_ports
            found.append((not ports, len(ports), child, ports))
        _, _, child, ports = min(found, key=lambda one: one[:2])
        return child, ports

    async def _not_ready_s(self, killed_s: float, streams: asyncio.Task[None]) -> float:
        """From then until /ready last changed to yes; asked until all streams have ended and it says yes."""
        again_s, is_ready = killed_s, True
        while not ((is_ready and streams.done()) or self._server.is_over):
            was_ready, is_ready = is_ready, await _says_ready(self._url)
            if is_ready and not was_ready:
                again_s = time.monotonic()
            await asyncio.sleep(POLL_S)
        return again_s - killed_s


def _body(prompt: list[int], seed: int, new_tokens: int, temperature: float) -> bytes:
    sampling = {
        "temperature": temperature,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "sampling_seed": seed,
    }
    return json.dumps({"input_ids": prompt, "sampling_params": sampling, "stream": True}).encode()


async def follow(url: str, body: bytes, answer: Answer, notice: Callable[[int], None]) -> None:
    """Send a request and note what comes, whatever becomes of it; `notice` hears how many ids each chunk has."""
    address = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
    except OSError as error:
        answer.trouble = str(error)
        return
    try:
        answer.port = writer.get_extra_info("sockname")[1]
        head = f"POST /generate HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        answer.trouble = await _read(reader, answer, notice)
    except OSError as error:
        answer.trouble = str(error)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader, answer: Answer, notice: Callable[[int], None]) -> str | None:
    """Why the stream did not come to its end; None if it did."""
    if not (status := await reader.readline()):
        return answer.trouble
    if b" 200 " not in status:
        return f"{status.decode().strip()}: {(await reader.read()).partition(END_OF_HEAD)[2].decode()}"
    async for line in reader:
        if line.startswith(b"data: {"):
            chunk = orjson.loads(line[6:])
            if "error" in chunk:
                return str(chunk["error"])
            answer.take(chunk)
            notice(len(chunk["output_ids"]))
        elif line.startswith(b"data: [DONE]"):
            return None
    return answer.trouble


async def _says_ready(url: str) -> bool:
    address = urlsplit(url)
    try:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        try:
            writer.write(f"GET /ready HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n\r\n".encode())
            return b" 200 " in await reader.readline()
        finally:
            writer.transport.abort()
    except OSError:
        return False


def victims(text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(VICTIMS):
        raise ValueError(text)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="tiny", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--num-requests", type=int, default=32, help="streams, all at once")
    parser.add_argument("--input-len", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of each answer")
    parser.add_argument(
        "--victims", type=victims, default=victims("worker,scheduler,frontend"), help=f"of {', '.join(VICTIMS)}"
    )
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jsonl", help="append the results to this file")
    options, server_options = parser.parse_known_args()
    if min(options.num_requests, options.input_len) < 1 or options.output_len < 2:
        parser.error("--num-requests and --input-len are at least 1, --output-len at least 2.")
    words = ["--model-path", models.folder_of(options.model_path), "--port", "0", "--incremental-streaming-output"]
    words += ["--tokenizer-worker-num", str(FRONTENDS), "--max-replacements", str(len(options.victims))]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, Server([*words, *server_options], folder) as server:
        try:
            return measure(server, options, server_options)
        except (CannotMeasure, OSError, psutil.Error) as error:
            print(error if isinstance(error, CannotMeasure) else f"{error}. {server.last_words()}", file=sys.stderr)
            return 1


def measure(server: Server, options: argparse.Namespace, server_options: list[str]) -> int:
    bench = Bench(server, options)
    undisturbed = bench.undisturbed()
    shape = f"{options.num_requests} × {options.input_len} tokens in, {options.output_len} out, {bench.dtype}"
    print(f"{options.model_path}, {shape}: {limits.versions()}")
    print(
        f"server ready after {bench.startup_s:.2f} s; undisturbed: {undisturbed.took_s:.2f} s,"
        f" pause p50 {undisturbed.gap_s(50):.2f}, max {undisturbed.gap_s(100):.2f} s"
    )
    print(HEAD, flush=True)
    found = []
    for victim in options.victims:
        found.append(bench.with_victim(victim, undisturbed))
        print(found[-1].row(), flush=True)
    print(FOOTER)
    chosen = {name: getattr(options, name) for name in ("num_requests", "input_len", "output_len", "temperature")}
    about = {"benchmark": "recovery", "model": options.model_path, "dtype": bench.dtype, **chosen}
    about |= {"options": server_options, "versions": limits.versions()}
    for figures in found:
        record = {**about, **{k: round(v, 4) if isinstance(v, float) else v for k, v in asdict(figures).items()}}
        print(json.dumps(record))
        limits.write_jsonl(options.jsonl, record)
    if all(figures.keeps_its_promise for figures in found):
        return 0
    print("A stream broke, a token was lost or repeated, or a new request had no answer.", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
