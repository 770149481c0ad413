"""The console command `srt`: a module for each of its commands, and the terminal that they share. Read `main.py` first."""
