"""One Fabric loop walks the timeline; executors train and evaluate, checkpoints and callbacks follow."""
