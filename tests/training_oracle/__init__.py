"""An oracle of training above the GEMMs: its own layer, model and study, and what records a run to compare with it."""
