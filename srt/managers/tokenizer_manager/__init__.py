"""A frontend's side of requests: text to tokens, the link to the scheduler, tokens back to text.

Runs in each HTTP frontend, and in the program that holds a `Runtime`. Read `tokenizer_manager.py` first: it takes a request
(`api_types.GenerateInput`) and yields updates of its choices (`api_types.ChoiceUpdate`). `request_ledger.py` records which tokens have
come, so that requests survive the death of the engine.
"""
