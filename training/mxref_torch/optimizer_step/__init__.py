"""What changes from one optimizer step to the next: micro-batches, the end of a step, the history of FP8's scales."""
