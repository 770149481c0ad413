"""OpenAI's routes: completions, chat completions, models."""
