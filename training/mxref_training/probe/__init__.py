"""The probe: what every recipe does to the operands and GEMMs of one checkpoint on one batch; nothing is trained."""
