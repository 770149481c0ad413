"""The options: as a command line, as keywords, and what is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from srt import server_args
from srt.server_args import ArgumentError, ServerArgs, from_keywords, parse_args

MODEL = ["--model-path", "m"]
RAY = [*MODEL, "--use-ray"]
HOSTS = [*MODEL, *"--nnodes 2 --dp-size 2 --dist-init-addr h:5000 --cluster-key-file key".split()]


def test_defaults_are_the_same_from_the_command_line_and_from_keywords() -> None:
    assert parse_args(MODEL) == from_keywords({"model_path": "m"}) == ServerArgs(model_path="m")


@pytest.mark.parametrize(
    ("words", "keywords"),
    [
        (["--model", "m"], {}),
        ([*MODEL, "--tp", "2"], {"tp_size": 2}),
        ([*MODEL, "--tensor-parallel-size", "2"], {"tp_size": 2}),
        ([*MODEL, "--tp-size=2"], {"tp_size": 2}),
        ([*MODEL, "--disable-radix-cache"], {"disable_radix_cache": True}),
        ([*MODEL, "--served-model-name", "a", "b"], {"served_model_name": ("a", "b")}),
        ([*MODEL, "--served-model-name", "a"], {"served_model_name": "a"}),
        ([*MODEL, "--mem-fraction-static", "0.5"], {"mem_fraction_static": 0.5}),
        ([*MODEL, "--watchdog-timeout", "5"], {"watchdog_timeout": 5}),
        ([*MODEL, "--context-length", "64"], {"context_length": 64}),
        ([*MODEL, "--device", "cpu"], {"device": "cpu"}),
        (
            [*MODEL, "--json-model-override-args", '{"hidden_size": 3}'],
            {"json_model_override_args": '{"hidden_size": 3}'},
        ),
    ],
    ids=str,
)
def test_every_kind_of_option_means_the_same_in_both(words: list[str], keywords: dict[str, Any]) -> None:
    assert parse_args(words) == from_keywords({"model_path": "m", **keywords})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model-path is missing"),
        ([*MODEL, "--port", "70000"], "--port must lie between 0 and 65535, not 70000"),
        ([*MODEL, "--port", "many"], "--port"),
        ([*MODEL, "--served-model-name", ""], "--served-model-name must not be empty"),
        ([*MODEL, "--tp", "0"], "--tp-size must be at least 1, not 0"),
        ([*MODEL, "--tp"], "--tp"),
        ([*MODEL, "--page-size", "0"], "--page-size must be at least 1"),
        ([*MODEL, "--chunked-prefill-size", "0"], "--chunked-prefill-size must be at least 1"),
        ([*MODEL, "--mem-fraction-static", "1.5"], "--mem-fraction-static must lie between 0 and 1"),
        ([*MODEL, "--watchdog-timeout", "0"], "--watchdog-timeout must be positive"),
        ([*MODEL, "--device", "tpu"], "--device"),
        ([*MODEL, "--api-key", ""], "--api-key must not be empty"),
        ([*MODEL, "--admin-api-key", " x"], "--admin-api-key must not be empty, nor begin or end with a space"),
        ([*MODEL, "--dtype", "int8"], "--dtype"),
        (
            [*MODEL, "--enable-response-store", "--tokenizer-worker-num", "2"],
            "--enable-response-store needs --tokenizer-worker-num 1",
        ),
        ([*MODEL, "--json-model-override-args", "{"], "--json-model-override-args is not JSON"),
        ([*MODEL, "--json-model-override-args", "[]"], "--json-model-override-args must be a JSON object"),
        ([*MODEL, "--max-total-tokens", "0"], "--max-total-tokens must be at least 1"),
        ([*MODEL, "--max-total-tokens", "9" * 30], "--max-total-tokens must be at most 2147483647"),
        ([*MODEL, "--dist-timeout", "99999999999"], "--dist-timeout must be at most 2147483647"),
        ([*MODEL, "--random-seed", "-9223372036854775809"], "--random-seed must be at most"),
        ([*MODEL, "--speculative-algorithm", "EAGLE"], "--speculative-algorithm"),
        (
            [*MODEL, "--speculative-num-draft-tokens", "4"],
            "--speculative-num-draft-tokens needs --speculative-algorithm",
        ),
        ([*MODEL, "--speculative-algorithm", "STANDALONE"], "needs --speculative-draft-model-path"),
        ([*MODEL, "--speculative-algorithm", "EAGLE3"], "EAGLE3 needs --speculative-draft-model-path"),
        ([*MODEL, "--speculative-eagle-topk", "1"], "--speculative-eagle-topk needs --speculative-algorithm EAGLE3"),
        (
            [
                *MODEL,
                *"--speculative-algorithm EAGLE3 --speculative-draft-model-path h --speculative-eagle-topk 4".split(),
            ],
            "drafts are chains",
        ),
        ([*MODEL, "--speculative-num-steps", "4"], "--speculative-num-steps needs --speculative-algorithm STANDALONE"),
        ([*MODEL, "--speculative-draft-model-path", "d"], "needs --speculative-algorithm STANDALONE"),
        (
            [*MODEL, "--speculative-ngram-max-match-window-size", "1"],
            "is less than --speculative-ngram-min-match-window",
        ),
        (
            [*MODEL, "--pp-layer-partition", "2", "2"],
            "--pp-layer-partition has 2 numbers of layers, but --pp-size is 1",
        ),
        ([*MODEL, "--pp-size", "2", "--pp-layer-partition", "0", "2"], "takes numbers of at least 1, not 0"),
        ([*MODEL, "--ep-size", "2"], "--ep-size 2 must divide --tp, which is 1"),
        ([*MODEL, "--tp", "2", "--ep-size", "0"], "--ep-size must be at least 1, not 0"),
        ([*MODEL, "--pp-size", "2", "--enable-torch-compile"], "works with all layers in one process only"),
        (
            [*MODEL, "--pp-size", "2", "--speculative-algorithm", "NGRAM"],
            "--speculative-algorithm works with all layers",
        ),
        ([*MODEL, "--nnodes", "0"], "--nnodes must be at least 1, not 0"),
        ([*MODEL, "--node-rank", "1"], "--node-rank must lie between 0 and 0 (see --nnodes), not 1"),
        ([*MODEL, "--dist-init-addr", "10.0.0.1:5000"], "--dist-init-addr needs --nnodes of at least 2"),
        ([*MODEL, "--nnodes", "2"], "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ([*MODEL, *"--nnodes 2 --dist-init-addr h:5000".split()], "--nnodes 2 needs --cluster-key-file"),
        ([*HOSTS, "--dist-init-addr", "h"], "--dist-init-addr must be HOST:PORT"),
        ([*HOSTS, "--dist-init-addr", "::1:5000"], "--dist-init-addr must have an IPv6 address in brackets"),
        ([*HOSTS, "--dist-init-addr", "0.0.0.0:5000"], "--dist-init-addr must be an address that the other hosts can"),
        ([*HOSTS, "--dist-init-addr", "h:65530"], "needs 6 free ports behind its own, so 65530 is too high"),
        ([*HOSTS, "--nnodes", "3"], "--nnodes 3 does not divide the 2 workers"),
        ([*HOSTS, "--nnodes", "4", "--dp-size", "6", "--tp", "2"], "--nnodes 4 does not divide the 12 workers"),
        ([*HOSTS, "--enable-lora"], "--enable-lora works on one host only"),
        ([*HOSTS, "--use-ray"], "--use-ray starts one host for each replica: leave out --nnodes"),
        ([*RAY, "--cluster-key-file", "key"], "--use-ray makes a secret of its own"),
        ([*RAY, "--ray-num-cpus", "0"], "--ray-num-cpus must be at least 1, not 0"),
        ([*RAY, "--enable-lora"], "--enable-lora works on one host only, not with --use-ray"),
        (
            [*RAY, *"--tp 2 --dp-size 2 --enable-dp-attention".split()],
            "--enable-dp-attention works on one host only, not with --use-ray",
        ),
        ([*RAY, "--dist-init-addr", "h"], "--dist-init-addr must be HOST:PORT"),
        ([*MODEL, "--ray-num-cpus", "2"], "--ray-num-cpus needs --use-ray"),
        ([*MODEL, "--no-such-thing"], "Unknown option --no-such-thing"),
        ([*MODEL, "stray"], "missing in stray"),
        ([*MODEL, "--page", "16"], "Unknown option --page"),  # no guessing from beginnings
    ],
    ids=str,
)
def test_a_wrong_option_is_one_sentence_that_names_it(words: list[str], said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        parse_args(words)
    sentence = str(caught.value)
    assert said in sentence
    assert sentence.endswith((".", ")."))
    assert "\n" not in sentence


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"tp_size": "2"}, "tp_size must be int, not str"),
        ({"tp_size": True}, "tp_size must be int, not bool"),
        ({"tp_size": None}, "tp_size must be int, not NoneType"),
        ({"context_length": "8"}, "context_length must be int or None, not str"),
        ({"disable_radix_cache": 1}, "disable_radix_cache must be bool, not int"),
        ({"device": "tpu"}, "device must be one of cpu, cuda, not 'tpu'"),
        ({"served_model_name": 5}, "served_model_name must be a name or a list of names"),
        ({"served_model_name": ["a", 5]}, "served_model_name must be a name or a list of names"),
        ({"no_such_thing": 1}, "Unknown option no_such_thing"),
        ({"nccl_port": 1}, "nccl_port is not supported yet"),
        ({"pp_size": 0}, "--pp-size must be at least 1, not 0"),
        ({"pp_layer_partition": "2"}, "pp_layer_partition must be a number or a list of numbers"),
        ({"tp_size": 0}, "must be at least 1, not 0"),
    ],
    ids=str,
)
def test_a_wrong_keyword_is_one_sentence_that_names_it(keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said.replace("(", r"\(")):
        from_keywords({"model_path": "m", **keywords})


@pytest.mark.parametrize("name", sorted(server_args.UNSUPPORTED))
def test_options_of_sglang_that_are_missing_here_are_refused_by_name(name: str) -> None:
    word = f"--{name.replace('_', '-')}"
    for words in ([*MODEL, word, "2"], [*MODEL, f"{word}=2"]):
        with pytest.raises(ArgumentError, match=f"^{word} is not supported yet"):
            parse_args(words)


def test_no_option_is_both_supported_and_not() -> None:
    assert not server_args.UNSUPPORTED & {f.name for f in dataclasses.fields(ServerArgs)}


def test_help_and_version_end_with_exit_code_0(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            parse_args([word])
        assert ended.value.code == 0
    assert "--model-path" in capsys.readouterr().out


def test_options_that_are_lists_of_numbers_are_read_and_checked() -> None:
    assert parse_args(["--model-path", "m", "--cuda-graph-bs", "1", "8"]).cuda_graph_bs == (1, 8)
    assert from_keywords({"model_path": "m", "cuda_graph_bs": 4}).cuda_graph_bs == (4,)
    assert from_keywords({"model_path": "m", "cuda_graph_bs": [2, 4]}).cuda_graph_bs == (2, 4)
    with pytest.raises(ArgumentError, match="cuda_graph_bs must be a number or a list of numbers"):
        from_keywords({"model_path": "m", "cuda_graph_bs": ["4"]})
    with pytest.raises(ArgumentError, match="--cuda-graph-bs takes numbers of at least 1, not 0"):
        parse_args(["--model-path", "m", "--cuda-graph-bs", "0", "8"])
    more = ["--model-path", "m", "--max-running-requests", "600", "--cuda-graph-bs", "8", "512"]
    assert parse_args(more).cuda_graph_bs == (8, 512)
    with pytest.raises(ArgumentError, match="--cuda-graph-bs 512 is more than --max-running-requests 256"):
        parse_args(["--model-path", "m", "--cuda-graph-bs", "8", "512"])
    with pytest.raises(ArgumentError, match="--cuda-graph-bs 512 is more than --cuda-graph-max-bs 300"):
        parse_args([*more, "--cuda-graph-max-bs", "300"])


def test_the_help_fits_a_terminal_and_tells_every_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = server_args.make_parser().format_help()
    assert text.startswith("usage: python -m srt.launch_server --model-path MODEL [options]\n")
    assert all(len(line) <= 80 for line in text.splitlines())
    entries = {entry.split()[0].rstrip(","): " ".join(entry.split()) for entry in re.split(r"\n  (?=-)", text)}
    for field in dataclasses.fields(ServerArgs):
        entry = entries[f"--{field.name.replace('_', '-')}"]
        is_told = field.default not in (None, "", ()) and field.default is not False
        assert not is_told or f"(default: {field.default})" in entry, entry
    assert {field.metadata["group"] for field in dataclasses.fields(ServerArgs)} == set(server_args.GROUPS)
    groups = list(server_args.GROUPS)
    assert [line[:-1] for line in text.splitlines() if line[:-1] in groups] == groups
