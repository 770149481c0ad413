"""The HTTP frontend and the Python API: routes, the JSON of requests and answers, health, metrics and the page.

Read `http_server.py` first (the process), then `app.py` (the table of routes and their handlers).
"""
