#!/usr/bin/env bash
# A real Slurm of several nodes on one machine: every node is a slurmd with its own network, host name and loopback.
#
#   slurmlab.sh up NODES | down | off NODE | on NODE      as root, with SLURMLAB set to a folder
#
# SLURMLAB_PROGRAMS=PATH:PATH are folders that users other than root need, in case they are in root's home.
# `off` is a power cut: everything that runs on the node dies at once, and nobody is told.
set -euo pipefail
lab=${SLURMLAB:?} nodes=${2:-}
export SLURM_CONF=$lab/etc/slurm.conf
controller=10.77.0.254

is_alive() { case $(ps -o stat= -p "$1") in '' | Z*) return 1 ;; esac; }

stop() {
    local pid
    pid=$(cat "$1" 2>/dev/null) || return 0
    kill "$pid" 2>/dev/null || return 0
    for _ in {1..50}; do
        is_alive "$pid" || return 0
        sleep 0.1
    done
}

down() {
    if [ -s "$lab/run/slurmctld.pid" ]; then
        squeue -h -o %A 2>/dev/null | xargs -r scancel || true
        for _ in {1..100}; do
            [ -n "$(squeue -h 2>/dev/null)" ] || break
            sleep 0.1
        done
    fi
    local node
    for node in $(ip netns list | awk '/^slurmlab-/ {print $1}'); do
        ip netns pids "$node" | xargs -r kill -9 || true
        ip netns del "$node"
    done
    stop "$lab/run/slurmctld.pid"
    stop "$lab/run/munged.pid"
    # A network that has lost its name lives until its last process is gone, and holds its link.
    ip -brief link | awk -F '[ @]' '/^slurmlab/ {print $1}' | xargs -r -n 1 ip link del || true
    find /sys/fs/cgroup/*/slurm_n* -depth -type d -exec rmdir {} + 2>/dev/null || true
}

configure() {
    rm -rf "${lab:?}"/{etc,run,log,state,spool,show}
    mkdir -p "$lab"/{etc,run,log,state,spool}
    dd if=/dev/urandom of="$lab/etc/munge.key" bs=128 count=1 status=none
    chmod 400 "$lab/etc/munge.key"
    # Traps of one machine: cgroup tracking, as on most clusters, signals only a task's own process; nodes with a network
    # of their own do not find each other at localhost.
    cat >"$SLURM_CONF" <<CONF
ClusterName=lab
SlurmctldHost=$(hostname -s)($controller)
SlurmctldPort=16817
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$lab/run/munge.sock
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmctldPidFile=$lab/run/slurmctld.pid
SlurmdPidFile=$lab/run/slurmd.%n.pid
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd.%n.log
ProctrackType=${PROCTRACK:-proctrack/cgroup}
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=0
JobCompType=jobcomp/filetxt
JobCompLoc=$lab/log/jobs.txt
ReturnToService=2
KillWait=20
SlurmdTimeout=6
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-$nodes] NodeHostname=n[1-$nodes] NodeAddr=10.77.0.[1-$nodes] Port=16818 CPUs=16 RealMemory=16000 Gres=gpu:2 State=UNKNOWN
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL PriorityTier=10
CONF
    printf 'CgroupPlugin=cgroup/v1\n' >"$lab/etc/cgroup.conf"
    mknod "$lab/run/gpu0" c 1 3 # what Slurm hands out as GPUs
    mknod "$lab/run/gpu1" c 1 3
    echo "NodeName=n[1-$nodes] Name=gpu File=$lab/run/gpu[0-1]" >"$lab/etc/gres.conf"
    {
        echo "127.0.0.1 localhost"
        echo "$controller $(hostname -s)"
        for ((i = 1; i <= nodes; i++)); do
            printf '%s n%d\n' "10.77.0.$i" "$i" "::ffff:10.77.0.$i" "$i"
        done
    } >"$lab/etc/hosts"
    chmod 755 "$lab" "$lab"/{etc,run,log,state,spool}
}

network() {
    ip link add slurmlab type bridge
    ip addr add "$controller/24" dev slurmlab
    ip link set slurmlab up
    for ((i = 1; i <= nodes; i++)); do
        ip netns add "slurmlab-n$i"
        ip link add "slurmlab$i" type veth peer name eth0 netns "slurmlab-n$i"
        ip link set "slurmlab$i" master slurmlab up
        ip -n "slurmlab-n$i" addr add "10.77.0.$i/24" dev eth0
        ip -n "slurmlab-n$i" link set eth0 up
        ip -n "slurmlab-n$i" link set lo up
    done
}

on() {
    mkdir -p "$lab/spool/$1"
    # Not `ip netns exec`, which remounts /sys and hides the cgroups.
    nsenter --net="/run/netns/slurmlab-$1" unshare --uts --mount bash "$0" boot "$1"
}

# On the node, in namespaces of its own.
boot() {
    mount --bind "$lab/etc/hosts" /etc/hosts
    hostname "$1"
    show_to_users "$1"
    exec slurmd -N "$1"
}

# On the nodes root's home holds only the programs that jobs need, and is open to every user.
show_to_users() {
    local paths=() path i home=~root
    while IFS= read -rd : path; do
        case $path in "$home"/*) paths+=("$path") ;; esac
    done <<<"${SLURMLAB_PROGRAMS:-}:"
    for i in "${!paths[@]}"; do
        mkdir -p "$lab/show/$1/$i"
        mount --bind "${paths[i]}" "$lab/show/$1/$i"
    done
    mount -t tmpfs -o mode=755 tmpfs "$home"
    for i in "${!paths[@]}"; do
        mkdir -p "${paths[i]}"
        mount --bind "$lab/show/$1/$i" "${paths[i]}"
    done
}

off() {
    ip link set "slurmlab${1#n}" down # first, or connections would be closed in due form
    ip netns pids "slurmlab-$1" | xargs -r kill -9
}

case $1 in
up)
    down
    configure
    munged --key-file="$lab/etc/munge.key" --socket="$lab/run/munge.sock" --pid-file="$lab/run/munged.pid" \
        --log-file="$lab/log/munged.log" --seed-file="$lab/run/munge.seed"
    network
    slurmctld
    for ((i = 1; i <= nodes; i++)); do on "n$i"; done
    for _ in {1..200}; do
        [ "$(sinfo -h -p normal -o %T | sort -u)" = idle ] && exit
        sleep 0.1
    done
    echo "error: the nodes do not come up, see $lab/log" >&2
    exit 1
    ;;
boot) boot "$2" ;;
down) down ;;
off) off "$2" ;;
on)
    ip link set "slurmlab${2#n}" up
    on "$2"
    ;;
esac
