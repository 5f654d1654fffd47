"""Training on many ranks: who they are, the mesh, and which part of the model and of the batch each one has."""
