# shellcheck shell=bash disable=SC2034  # job.sh beside it reads these variables
# Everything that differs between clusters. Copy it to site.sh, edit, leave out what you do not need.

# Where jobs go. sbatch reads these from its environment: `source launch_scripts/slurm/site.sh` before sbatch;
# `prores submit` does that by itself.
export SBATCH_ACCOUNT=my-project
export SBATCH_PARTITION=gpu

# The environment with this package, once per start on the first node; srun takes it to the others.
activate() {
    module load cuda || return
    # shellcheck source=/dev/null
    source "$HOME/megatron_prores/.venv/bin/activate"
}

# Or a container, with pyxis. Then `activate` may stay away; python is the container's.
# srun_options=(--container-image=/images/pytorch.sqsh "--container-mounts=$HOME,/scratch")

# The interface that nodes talk over (`ip -brief address` on a node), where NCCL and gloo choose wrongly.
network_interface=ib0

# Added to a node's name where only another name of it resolves to the fast network.
host_suffix=

# Processes on a node; left out: one per GPU.
processes_per_node=

# Starts in a row without a new checkpoint after which the job gives up.
max_stalled=3
