"""What one thread does in its registers: scale, rounding, random bits, Hadamard, and each target's instructions."""
