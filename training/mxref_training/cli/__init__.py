"""The commands `mxref train`, `mxref ablate` and `mxref report`."""
