"""Compare ways to train on the same samples."""
