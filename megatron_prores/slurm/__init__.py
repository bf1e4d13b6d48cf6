"""What runs inside a Slurm job beside the trainer: what prepares a start, and what guards each node."""
