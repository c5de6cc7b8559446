"""The whole-supervisor simulation; start at `run.py`."""
