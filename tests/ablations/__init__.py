"""The ladders that were run on GPUs: their results in docs/records, and the page that shows them."""
