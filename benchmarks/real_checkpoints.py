"""Serve real checkpoints and real tokenizers on a CPU, and compare with the library transformers. Needs no GPU, and files that you have.

    python -m benchmarks.real_checkpoints --gguf FILE FOLDER     write the weights of a GGUF file, dequantised, as a checkpoint
    python -m benchmarks.real_checkpoints --models FOLDER ...    the perplexity of fixed texts, and the answer to a question
    python -m benchmarks.real_checkpoints --templates FOLDER ... the ids of chats, by the tokenizer and the chat template there

Goals: perplexities within 0.1 %, and ids equal to those of `apply_chat_template`. `--gguf` needs the packages gguf and accelerate.
docs/testing.md says where registries have such files.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.accuracy import TEXTS, read_text
from benchmarks.recovery import READY, Server

MOST_DIFFERENCE = 0.001
QUESTION = "What is the capital of France? Answer in one sentence."
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello"}],
    [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "  What is 2 + 2?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "日本語 🙂 <b>and</b> {{ braces }}"},
    ],
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gguf", type=Path, nargs=2, metavar=("FILE", "FOLDER"))
    what.add_argument("--models", type=Path, nargs="+", metavar="FOLDER")
    what.add_argument("--templates", type=Path, nargs="+", metavar="FOLDER")
    options = parser.parse_args()
    if options.gguf:
        convert(*options.gguf)
        return 0
    measure = measure_model if options.models else compare_template
    are_met = [measure(folder) for folder in options.models or options.templates]
    return 0 if all(are_met) else 1


def convert(file: Path, folder: Path) -> None:
    """Write the weights of a GGUF file as a checkpoint in float32, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    del read.config.quantization_config  # the library saves no model that has one
    plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def measure_model(folder: Path) -> bool:
    """Print the perplexities and an answer. Return whether the goal is met."""
    ids = [tokenize(folder, text) for text in TEXTS]
    expected = reference_perplexity(folder, ids)
    with serve(folder) as url:
        logprobs = [one.logprob for text in ids for one in read_text(url, {"input_ids": text})[1:]]
        answer = complete(url, folder)
    found = math.exp(-sum(logprobs) / len(logprobs))
    difference = abs(found / expected - 1)
    report("perplexity", model=folder.name, transformers=expected, srt=found, difference=difference, answer=answer)
    return difference <= MOST_DIFFERENCE


def compare_template(folder: Path) -> bool:
    """Serve a tiny random model with this tokenizer, and print how many chats have the ids that the library gives them."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary, "model")
        write_tiny_model(model, folder)
        tokenizer = AutoTokenizer.from_pretrained(model)
        with serve(model) as url:
            same = [
                chat_ids(url, chat)
                == tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
                for chat in CHATS
            ]
    report("chat template", tokenizer=folder.name, chats=len(CHATS), equal=sum(same))
    return all(same)


def write_tiny_model(folder: Path, tokenizer: Path) -> None:
    """Write a random Llama with one narrow layer beside a copy of the tokenizer's files."""
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tokenizer, folder)
    config = LlamaConfig(
        vocab_size=1 + max(Tokenizer.from_file(str(tokenizer / "tokenizer.json")).get_vocab().values()),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def tokenize(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return ids


def reference_perplexity(folder: Path, texts: list[list[int]]) -> float:
    """Return the perplexity over all texts, each read alone by the library in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in map(torch.tensor, texts):
            logprobs = model(ids[None]).logits[0, :-1].double().log_softmax(dim=-1)
            total += float(logprobs.gather(1, ids[1:, None]).sum())
            count += len(ids) - 1
    return math.exp(-total / count)


@contextmanager
def serve(folder: Path) -> Iterator[str]:
    """Serve a model on the CPU in float32. Yields the server's address."""
    words = ["--model-path", str(folder), "--device", "cpu", "--dtype", "float32", "--port", "0"]
    with (
        tempfile.TemporaryDirectory() as temporary,
        Server([*words, "--max-total-tokens", "8192"], temporary) as server,
    ):
        _, line = server.wait_for(READY)
        yield line.split(READY)[1].split()[0]


def chat_ids(url: str, messages: list[dict[str, str]]) -> list[int]:
    answer = post(f"{url}/v1/chat/completions", {"messages": messages, "max_tokens": 1, "return_token_ids": True})
    ids: list[int] = answer["prompt_token_ids"]
    return ids


def complete(url: str, folder: Path) -> str:
    """Return the model's answer to a question, or what it says next if it has no chat template."""
    from transformers import AutoTokenizer

    if AutoTokenizer.from_pretrained(folder).chat_template is None:
        answer = post(
            f"{url}/v1/completions", {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0}
        )
        return str(answer["choices"][0]["text"])
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, "temperature": 0}
    return str(post(f"{url}/v1/chat/completions", body)["choices"][0]["message"]["content"])


def post(url: str, body: dict[str, Any]) -> Any:
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as response:
        return json.load(response)


def report(benchmark: str, **figures: object) -> None:
    print(json.dumps({"benchmark": benchmark, **figures}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    sys.exit(main())
