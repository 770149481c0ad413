"""Judge answers by the oracle, token by token: each must be its draw behind the tokens before, unless that draw is close.

Rounding decides close draws. So answers may be compared that were computed in batches of different shapes, even where one of them took
another turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from srt.sampling.sampling_params import SamplingParams, choice_seed
from srt.utils.tokenizer import load_tokenizer
from tests.support import oracle

CLOSE: Final = 1e-4
"""Largest margin of a draw that rounding in float32 may decide. One draw in some thousands is as close by chance."""
LOGPROB_ERROR: Final = 1e-3
Answers = dict[int, dict[str, Any]]  # the last chunk of each choice of a request


@dataclass(frozen=True, slots=True)
class WrongToken:
    """A token that the oracle does not draw there, or whose logprob is not the oracle's."""

    request: int
    choice: int
    token: int  # its place in the output
    found: int
    drawn: int  # by the oracle
    margin: float  # of the closest decision of the draw
    gap: float  # by which the oracle prefers its own draw
    logprob_error: float  # 0 if the answer has no logprobs

    @property
    def is_close(self) -> bool:
        return self.margin <= CLOSE and self.logprob_error <= LOGPROB_ERROR

    def __str__(self) -> str:
        return (
            f"request {self.request}, choice {self.choice}, token {self.token}: {self.found}, the oracle draws {self.drawn}"
            f" with a margin of {self.margin:.1e}, by {self.gap:.1e}; the logprob is off by {self.logprob_error:.1e}"
        )


class AnswerJudge:
    """Judges answers of /generate to `bodies`, which name texts and sampling parameters, of one checkpoint in float32."""

    def __init__(self, folder: Path, bodies: list[dict[str, Any]]) -> None:
        self._oracle = oracle.Oracle(folder)
        self._bodies = bodies
        self._prompts = [load_tokenizer(folder).encode(body["text"]) for body in bodies]

    def wrong_tokens(self, answers: list[Answers]) -> list[WrongToken]:
        """Return all tokens that are not the oracle's, close draws included."""
        assert len(answers) == len(self._bodies)
        chunks = [(n, choice, chunk) for n, choices in enumerate(answers) for choice, chunk in choices.items()]
        return [wrong for one in chunks for wrong in self._judge(*one)]

    def _judge(self, request: int, choice: int, chunk: dict[str, Any]) -> list[WrongToken]:
        prompt, output = self._prompts[request], chunk["output_ids"]
        assert chunk["meta_info"]["prompt_tokens"] == len(prompt)
        params = SamplingParams.from_dict(self._bodies[request]["sampling_params"])
        spec, seed = params.spec(len(output), ()), choice_seed(params.sampling_seed or 0, choice)
        ids = [*prompt, *output]
        logprobs = self._oracle.logprobs(ids)
        told = [row[0] for row in chunk["meta_info"].get("output_token_logprobs", ())]
        wrong = []
        for token, found in enumerate(output):
            known, of_model = ids[: len(prompt) + token], logprobs[len(prompt) + token - 1]
            drawn, margin = oracle.draw(of_model, known, len(prompt), spec, seed)
            error = abs(told[token] - of_model[found]) if told else 0.0
            if drawn != found or error > LOGPROB_ERROR:
                gap = self._gap(of_model, known, len(prompt), spec, seed, drawn, found)
                wrong.append(WrongToken(request, choice, token, found, drawn, margin, gap, error))
        return wrong

    def largest_logprob_error(self, answers: list[Answers]) -> float:
        """Return the largest distance of an output's logprob from the oracle's; 0 if there are none."""
        errors = [0.0]
        for request, choices in enumerate(answers):
            for chunk in choices.values():
                prompt, rows = self._prompts[request], chunk["meta_info"].get("output_token_logprobs", ())
                logprobs = self._oracle.logprobs([*prompt, *chunk["output_ids"]])[len(prompt) - 1 :]
                errors += [abs(row[0] - of_model[row[1]]) for row, of_model in zip(rows, logprobs, strict=False)]
        return float(np.max(errors))

    @staticmethod
    def _gap(
        of_model: oracle.Float64Array, known: list[int], prompt_len: int, spec: Any, seed: int, drawn: int, found: int
    ) -> float:
        """Return how much larger the score of the oracle's token is than that of the other one, before filters."""
        scores = oracle._penalised(of_model, known, prompt_len, spec)
        if spec.temperature:
            scores = scores / spec.temperature + oracle.gumbel_noise(seed, len(known), len(scores))
        return float(scores[drawn] - scores[found])
