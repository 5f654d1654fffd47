"""Faults planted into the training code, one at a time: the oracle's checks must catch each."""
