"""What a quantized checkpoint was quantized with, by its headers and a sample of its codes."""
