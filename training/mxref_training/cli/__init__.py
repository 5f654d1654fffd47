"""The commands `mxref train`, `mxref ablate`, `mxref probe`, `mxref export` and `mxref report`."""
