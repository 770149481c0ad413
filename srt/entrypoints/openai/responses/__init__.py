"""/v1/responses: OpenAI's Responses API, written as chats on the way in and as items on the way out. Start at `routes.py`."""
