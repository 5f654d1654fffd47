"""Hugging Face's layout of a Llama: the keys of config.json, and weights in safetensors files."""
