"""One training run: its loop, folder and checkpoints, evaluation and what it reports."""
