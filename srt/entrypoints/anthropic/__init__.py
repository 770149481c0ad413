"""Anthropic's routes: messages, and counting their tokens. They answer chats in Anthropic's shapes."""
