# shellcheck shell=bash
# Sourced by the batch scripts: `run_job MODULE RUN [FLAGS ...]` trains in the folder RUN, has it saved when Slurm warns,
# and puts the job back into the queue until the run is complete.
#
# Reads PRORES_SITE, the site file (default: site.sh here), and PRORES_PROCESSES, per node (default: the site file's, or
# one per GPU). RUN/slurm.state says how it stands; `prores status` reads it.

run_job() {
    local module=$1 status=0
    run=${2:-} warned='' ending='' step='' stalled=0 fruitless=0 cause=''
    [[ -n $run && $run != -* ]] || { echo "error: the first argument is the run's folder" >&2 && exit 2; }
    shift 2
    # Not the job's own number in an array: one of its runs has the array's, which stands for all of them.
    job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
    job=${job:-$SLURM_JOB_ID} from=$(_iteration) target=$(_recorded target)
    mkdir -p "$run/logs"
    trap _warned USR1
    trap _ending TERM
    _load_site
    if ((${SLURM_RESTART_COUNT:-0} > 0)) && [ "$(_recorded from)" = "$from" ]; then
        stalled=$(($(_recorded stalled) + 1))
    fi
    fruitless=$stalled
    ((fruitless < max_stalled)) || _give_up 1 "every start was killed"
    _record running
    step_options=(--nodes=1 --ntasks=1)
    target=$(_srun megatron_prores.slurm.prepare "$run/checkpoints" "$@") || status=$?
    ((status != 2)) || _give_up 2 "the flags cannot be used"
    ((status != 127)) || cause="no '$python' on the node: see activate in the site file"
    if ((status == 0)); then
        from=$(_iteration)
        _record running
        _say "start $((${SLURM_RESTART_COUNT:-0} + 1)): iteration $from of $target, on $SLURM_JOB_NODELIST"
        _train "$module" "$@" || status=$?
        ((status == 0)) || cause=$(_refusal)
        # On a job's first start that is its flags or data; later, what worked before, and perhaps does again.
        if [ -n "$cause" ] && [ -z "$ending" ] && ((${SLURM_RESTART_COUNT:-0} == 0 && $(_iteration) == from)); then
            _give_up 2 "$cause"
        fi
    fi
    _finish "$status"
}

_load_site() {
    processes_per_node='' network_interface='' host_suffix='' max_stalled=3 python=python srun_options=()
    local site=${PRORES_SITE:-${BASH_SOURCE[0]%/*}/site.sh}
    activate() { :; }
    if [ -e "$site" ]; then
        # shellcheck source=launch_scripts/slurm/site.example.sh
        source "$site"
    fi
    set +u # modules and conda read variables that are not set
    activate || _give_up 2 "activate in $site fails"
    set -u
    if [ -n "$network_interface" ]; then
        export NCCL_SOCKET_IFNAME=$network_interface GLOO_SOCKET_IFNAME=$network_interface
    fi
    # shellcheck disable=SC2016  # torchrun replaces it
    export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE='[rank ${rank}] '
    export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
}

# What every step needs to hear again: srun takes neither -c nor, after `sbatch --export=NONE`, the environment.
# A warning that comes before srun, and python on the nodes, can take it must not kill them: it is repeated.
_srun() {
    trap '' USR1
    exec srun --kill-on-bad-exit=1 --wait=600 --export=ALL --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" \
        ${srun_options[@]+"${srun_options[@]}"} "${step_options[@]}" \
        sh -c 'trap "" USR1 TERM; exec "$@"' sh "$python" -m "$@" </dev/null
}

_train() {
    local module=$1 processes host port status
    shift
    processes=${PRORES_PROCESSES:-${processes_per_node:-${SLURM_GPUS_ON_NODE:-}}}
    [ -n "$processes" ] || _give_up 2 "how many processes? Ask for --gpus-per-node, or set processes_per_node"
    host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)$host_suffix
    port=$((10000 + SLURM_JOB_ID % 20000)) # below those that systems hand out by themselves, 32768 and up
    step_options=(--ntasks-per-node=1 --label)
    _srun megatron_prores.slurm.node --endpoint "$host:$port" \
        --processes "$processes" --host-suffix "$host_suffix" --logs "$run/logs/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
        --interface "$network_interface" \
        -- -m "$module" --save "$run/checkpoints" --load "$run/checkpoints" --tensorboard-dir "$run/tensorboard" \
        --exit-signal-handler "$@" &
    step=$!
    [ -z "$warned" ] || _warned
    # A trapped signal ends `wait` early; srun's own code comes from a `wait` that was not interrupted.
    while true; do
        interrupted='' status=0
        wait "$step" || status=$?
        [ -n "$interrupted" ] || return "$status"
    done
}

# The time limit is near. Only this shell was told; srun passes the signal on, once the step is there.
_warned() {
    interrupted=yes warned=yes
    [ -n "$step" ] || return 0
    _say "warned by Slurm: saving at iteration boundaries"
    while kill -USR1 "$step" 2>/dev/null; do sleep 5; done &
}

# Slurm ends this start: requeued, preempted, cancelled, or out of time. It has told the step too, and decides what follows.
_ending() {
    interrupted=yes
    [ -z "$ending" ] || return 0
    ending=yes stalled=$((stalled - 1)) # whatever comes of it, the run is not to blame
    _record ending "Slurm ended this start"
}

_finish() {
    local status=$1 iteration
    iteration=$(_iteration)
    fruitless=$((iteration > from ? 0 : stalled + 1))
    if ((status == 0 && iteration >= target)); then
        _record complete
        _say "complete: iteration $iteration of $target"
    elif [ -n "$ending" ]; then
        _say "ended by Slurm at iteration $iteration of $target"
        exit "$status"
    elif ((fruitless < max_stalled)); then
        _say "iteration $iteration of ${target:-?}, exit code $status: back into the queue"
        trap '' TERM # that is how Slurm ends this script
        _record waiting
        scontrol requeue "$job" || _give_up 1 "Slurm does not requeue this job: submit it again to continue"
    else
        _give_up "$status" "${cause:-exit code $status}"
    fi
}

_give_up() {
    local status=$1 reason=$2
    ((fruitless < 2)) || reason+="; $fruitless starts in a row without a new checkpoint"
    _record failed "$reason"
    echo "error: stopped at iteration $(_iteration): $reason" >&2
    exit $((status > 0 ? status : 1))
}

# The line in which the trainer of this start said what it cannot use; nothing where it ended otherwise.
_refusal() {
    local logs=$run/logs/$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
    grep -rhm1 '^error: ' "$logs" 2>/dev/null | sed -n '1s/^error: //p' || true
}

_say() { echo "prores: $*"; }

# Of the last whole checkpoint; 0 where there is none. Both engines name it last, DeepSpeed as global_step12.
_iteration() {
    local file name=''
    for file in latest_checkpointed_iteration.txt latest; do
        ! name=$(cat "$run/checkpoints/$file" 2>/dev/null) || break
    done
    name=${name##*[!0-9]}
    echo "${name:-0}"
}

_recorded() { sed -n "s/^$1=//p" "$run/slurm.state" 2>/dev/null || true; }

_record() {
    printf '%s\n' "state=$1" "reason=${2:-}" "job=$job" "requeued=${SLURM_RESTART_COUNT:-0}" "stalled=$stalled" \
        "from=$from" "target=$target" >"$run/slurm.state.new"
    mv "$run/slurm.state.new" "$run/slurm.state"
}
