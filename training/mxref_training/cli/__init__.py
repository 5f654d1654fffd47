"""The commands `mxref train`, `mxref ablate`, `mxref probe` and `mxref report`."""
