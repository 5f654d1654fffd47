"""An oracle of training above the GEMMs: its own layer, model and study, and the recording of runs to compare with."""
