"""The linear layer, the operands of its GEMMs, and its gradients."""
