"""What runs inside a Slurm job beside the trainer: the preparation of a start, and one process per node that guards it."""
