"""The ladders that were run on GPUs: their results in docs/records/ablations, and the page that shows them."""
