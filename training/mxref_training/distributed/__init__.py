"""Where the ranks of a run meet.

`connect` joins what `torchrun` started, `ranks` is what they tell each other, and `failing` ends all of them if one
fails. Before the first step `agreement` compares what all must have in common. In a step `share` has each rank's part
of the batch and adds gradients, norms and FP8 scales; `sharded` splits a model by FSDP2 and tensor parallelism.
Beyond this folder ranks meet where a checkpoint is written or read, in an evaluation, and when they agree on a signal.
"""
