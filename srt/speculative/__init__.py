"""Speculative decoding: guess a row's next tokens, and keep the guesses that the model would have drawn itself.

`drafter.py` says what guesses, `acceptance.py` which guesses are kept. `model_executor/speculating_runner.py` uses both.
"""
