"""What it costs to follow a JSON Schema: steps, throughput and first tokens with schemas beside the same without.

    python -m benchmarks.constrained --model-path qwen3-8b --load-format dummy [--only steps,throughput,first] [any option of the server]

Both sides make the same number of tokens: the schemas allow answers of any length that is asked for. They run in turns on one engine,
and the best run of each side counts.
steps: 64 rows decode 256 tokens; a step is the difference of a long answer and one of a single token, over the tokens between.
throughput: 256 requests of 100 to 1,024 tokens in and out at once, with 32 schemas.
first: one request after the other; each has a schema that the engine has not seen. The time to try a schema, which is most of what it
adds, is also measured by itself, with its processor time: on a busy machine only that one says something.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from benchmarks import limits, models
from benchmarks.graphs import wait_for_graphs
from srt.constrained.compile_process import try_constraint
from srt.constrained.constraint import Constraint
from srt.constrained.matcher import Grammars
from srt.constrained.vocabulary import Vocabulary
from srt.runtime import Runtime
from srt.server_args import parse_args
from srt.utils.tokenizer import load_tokenizer

PARTS = ("steps", "throughput", "first")
NUM_SCHEMAS = 32
LONGEST = 1024  # tokens out
Schemas = Sequence[str] | None


def array_schema(number: int) -> str:
    """Return a schema of records that no answer of LONGEST tokens can complete; each number has another one."""
    record: dict[str, Any] = {
        f"id_{number}": {"type": "integer", "minimum": 0, "maximum": 99_999},
        "name": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["red", "green", f"blue {number}"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
        "is_new": {"type": "boolean"},
    }
    items = {"type": "object", "properties": record, "required": list(record), "additionalProperties": False}
    return json.dumps({"type": "array", "items": items, "minItems": LONGEST})


def fresh_schema(draws: random.Random) -> str:
    """Return a schema of ten fields, as clients make them from their types. Names are random, so that it is a new one."""
    kinds: list[Callable[[], dict[str, Any]]] = [
        lambda: {"type": "string", "maxLength": draws.randint(10, 200)},
        lambda: {"type": "integer", "minimum": 0, "maximum": draws.randint(10, 10**6)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"enum": [f"value {draws.randrange(10**6)}" for _ in range(draws.randint(2, 12))]},
        lambda: {"type": "string", "format": "date-time"},
        lambda: {"type": "array", "items": {"type": "string"}, "maxItems": draws.randint(1, 20)},
        lambda: {"anyOf": [{"type": "string"}, {"type": "null"}]},
    ]
    fields = {f"field_{draws.randrange(10**9)}": draws.choice(kinds)() for _ in range(9)}
    inner = {f"inner_{draws.randrange(10**9)}": draws.choice(kinds)() for _ in range(3)}
    fields["details"] = {"type": "object", "properties": inner, "required": list(inner), "additionalProperties": False}
    return json.dumps({"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False})


@dataclass(frozen=True, slots=True)
class Line:
    """A figure of both sides, and their ratio: of a time above 1, of a rate below 1, if schemas cost something."""

    what: str
    unit: str
    without: float
    with_schemas: float

    def text(self) -> str:
        ratio = self.with_schemas / self.without
        return f"{self.what:38} {self.unit:9} {self.without:11,.3f} {self.with_schemas:12,.3f}  ratio {ratio:.3f}"


class Bench:
    """One engine, and the requests of both sides to it."""

    def __init__(self, runtime: Runtime, vocab_size: int, temperature: float, rounds: int, seed: int) -> None:
        self._runtime = runtime
        self._vocab_size = vocab_size
        self._temperature = temperature
        self._rounds = rounds
        self._rng = np.random.default_rng(seed)

    def seconds(self, lengths_in: Sequence[int], lengths_out: Sequence[int], schemas: Schemas) -> float:
        """Run requests of these lengths at once. With schemas, each has the next one of them."""
        prompts = [self._rng.integers(300, min(self._vocab_size, 150_000), length).tolist() for length in lengths_in]
        sampling: list[dict[str, Any]] = [
            {"temperature": self._temperature, "max_new_tokens": int(n), "ignore_eos": True, "sampling_seed": i}
            for i, n in enumerate(lengths_out)
        ]
        if schemas is not None:
            for i, one in enumerate(sampling):
                one["json_schema"] = schemas[i % len(schemas)]
        begin_s = time.perf_counter()
        answers = self._runtime.generate(input_ids=prompts, sampling_params=sampling)
        took_s = time.perf_counter() - begin_s
        assert [len(a["output_ids"]) for a in answers] == list(lengths_out), "an answer is shorter than asked"
        return took_s

    def best_of_both(self, measure: Callable[[Schemas], float]) -> tuple[float, float]:
        """Measure without and with schemas in turns; return the least of each."""
        schemas = [array_schema(number) for number in range(NUM_SCHEMAS)]
        runs = [(measure(None), measure(schemas)) for _ in range(self._rounds)]
        return min(without for without, _ in runs), min(with_schemas for _, with_schemas in runs)

    def steps(self, num_rows: int, length: int, new_tokens: int) -> list[Line]:
        def step_ms(schemas: Schemas) -> float:
            short_s = min(self.seconds([length] * num_rows, [1] * num_rows, schemas) for _ in range(2))
            long_s = self.seconds([length] * num_rows, [new_tokens] * num_rows, schemas)
            return (long_s - short_s) / (new_tokens - 1) * 1e3

        what = f"step, {num_rows} rows of {length} + {new_tokens}"
        return [Line(what, "ms", *self.best_of_both(step_ms))]

    def throughput(self, num_requests: int, least: int, most: int) -> list[Line]:
        lengths_in, lengths_out = (self._rng.integers(least, most + 1, num_requests).tolist() for _ in range(2))
        without_s, with_s = self.best_of_both(lambda schemas: self.seconds(lengths_in, lengths_out, schemas))
        tokens = sum(lengths_out)
        what = f"{num_requests} requests, {NUM_SCHEMAS} schemas"
        return [Line(what, "tokens/s", tokens / without_s, tokens / with_s)]

    def first(self, schemas: Sequence[str]) -> list[Line]:
        """Time one request for each of these schemas, and in between as many without."""
        times_ms = [
            [1e3 * self.seconds([128], [1], None), 1e3 * self.seconds([128], [1], [schema])] for schema in schemas
        ]
        found = np.percentile(times_ms, (50, 99), axis=0).tolist()
        return [
            Line(f"first token, new schema, p{percent}", "ms", *both)
            for percent, both in zip((50, 99), found, strict=True)
        ]


def trials(vocabulary: Vocabulary, schemas: Sequence[str]) -> list[str]:
    """Say how long the compile process tries one of these schemas, and a worker compiles it: real and processor time."""
    times_ms = []
    for schema in schemas:
        constraint = Constraint("json_schema", schema)
        clocks = [(time.perf_counter(), time.process_time())]
        text = try_constraint(constraint, vocabulary)
        clocks.append((time.perf_counter(), time.process_time()))
        Grammars(vocabulary).compile(constraint.key, text)
        clocks.append((time.perf_counter(), time.process_time()))
        times_ms.append(np.diff(clocks, axis=0) * 1e3)
    lines = []
    for place, what in enumerate(("trial of a new schema", "compilation in a worker")):
        (real50, cpu50), (real99, cpu99) = np.percentile([one[place] for one in times_ms], (50, 99), axis=0)
        lines.append(f"{what:38} ms        p50 {real50:.2f} (CPU {cpu50:.2f}), p99 {real99:.2f} (CPU {cpu99:.2f})")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-path", default="qwen3-0.6b", help="a shape in benchmarks/configs, or any model")
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}, separated by commas")
    parser.add_argument("--rows", type=int, default=64, help="of steps")
    parser.add_argument("--context", type=int, default=1024, help="prompt tokens of these rows")
    parser.add_argument("--answer", type=int, default=256, help="tokens out of these rows")
    parser.add_argument("--requests", type=int, default=256, help="of throughput")
    parser.add_argument("--least", type=int, default=100, help="their tokens in and out, at least")
    parser.add_argument("--most", type=int, default=LONGEST, help="their tokens in and out, at most")
    parser.add_argument("--new-schemas", type=int, default=100, help="of first")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--rounds", type=int, default=2, help="of both sides; the best of each is shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jsonl", help="append the result to this file")
    options, server_options = parser.parse_known_args()
    parts = options.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only takes some of {', '.join(PARTS)}, separated by commas.")
    counts = (options.rows, options.context, options.requests, options.least, options.new_schemas, options.rounds)
    if min(*counts, options.answer - 1) < 1 or not options.least <= options.most <= LONGEST:
        parser.error(
            f"All numbers are at least 1, --answer at least 2, --most from --least to {LONGEST}, which no schema completes."
        )
    folder = models.folder_of(options.model_path)
    args = parse_args(["--model-path", folder, *server_options])
    given = {name: value for name, value in asdict(args).items() if value != getattr(type(args)(), name)}
    print(f"{options.model_path}; {limits.versions()}")
    print(f"{'':48} {'without':>11} with schemas")
    lines: list[Line] = []
    draws = random.Random(options.seed)
    with Runtime(**given) as runtime:
        model = runtime._engine._service.engine().model
        bench = Bench(runtime, model.vocab_size, options.temperature, options.rounds, options.seed)
        bench.best_of_both(lambda schemas: bench.seconds([64] * options.rows, [16] * options.rows, schemas))
        wait_for_graphs(runtime)
        for part in parts:
            match part:
                case "steps":
                    news = bench.steps(options.rows, options.context, options.answer)
                case "throughput":
                    news = bench.throughput(options.requests, options.least, options.most)
                case _:
                    news = bench.first([fresh_schema(draws) for _ in range(options.new_schemas)])
            print("\n".join(line.text() for line in news), flush=True)
            lines += news
    if "first" in parts:
        vocabulary = Vocabulary(load_tokenizer(folder), model.vocab_size, model.eos_ids)
        print("\n".join(trials(vocabulary, [fresh_schema(draws) for _ in range(options.new_schemas)])))
    record = {"benchmark": "constrained", "model": options.model_path, "options": server_options}
    limits.write_jsonl(options.jsonl, {**record, "versions": limits.versions(), "lines": [asdict(x) for x in lines]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
