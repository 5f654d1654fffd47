"""Ten training steps of each arm of a ladder: the metrics of two trees, byte for byte."""
