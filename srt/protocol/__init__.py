"""Messages between processes, their encoding, and the sockets that they travel by. Read `messages.py` first."""
