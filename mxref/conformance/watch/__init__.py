"""What a backend does beside its answers: to memory, and to the process that it runs in."""
