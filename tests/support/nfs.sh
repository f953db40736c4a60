#!/bin/bash
# A campaign that is killed on one NFS client and goes on on another, and what the clients see of each other.
#
#     tests/support/nfs.sh 3 4.2            # as root, on a Linux whose kernel has nfsd, nfs, veth: a virtual machine will do
#
# 1. This machine serves /srv/nfs; two hosts, namespaces with a link and a mount each, are its clients. Their kernel is one,
#    but a client belongs to its network namespace: caches, sessions and connections are each host's own.
# 2. For each version: the probes (tests/support/nfs_probes.py), and the small campaign (tests/support/recipes.py) of two workers:
#    all of host a is killed in mid-step, and the same command goes on on host b. A run on a local disk is the yardstick.
set -u
python=${PYTHON:-.venv/bin/python}
export PATCHLINE_CACHE=${PATCHLINE_CACHE:-/tmp/cache} OMP_NUM_THREADS=1
mkdir -p /srv/nfs /shared /var/lib/nfs/{sm,sm.bak,v4recovery,rpc_pipefs} "$PATCHLINE_CACHE"
touch /var/lib/nfs/{etab,rmtab}
$python -c 'from tests.support.recipes import SMALL; print(SMALL)' >/tmp/small.yaml
overrides="pretrain.log_every=1 pretrain.micro_batch=1"

# 1.
rpcbind; mount -t nfsd nfsd /proc/fs/nfsd
rpc.nfsd --no-udp 8 && rpc.mountd --port 20048
exportfs -o rw,sync,no_root_squash,fsid=0,no_subtree_check '10.78.0.0/24:/srv/nfs'
ip link add bridge78 type bridge && ip address add 10.78.0.1/24 dev bridge78 && ip link set bridge78 up
for host in a b; do
    ip netns add $host
    ip link add v$host type veth peer name eth0 netns $host
    ip link set v$host master bridge78 up
    number=2; [ $host = b ] && number=3
    ip -n $host link set lo up; ip -n $host link set eth0 up; ip -n $host address add 10.78.0.$number/24 dev eth0
done

# on HOST VERSION COMMAND: with a table of processes, a name and a mount of its own.
on() {
    local options="vers=$2,proto=tcp,hard" path=/  # version 4 sees /srv/nfs as its root
    [ "$2" = 3 ] && options="$options,nolock,port=2049,mountport=20048,mountproto=tcp" path=/srv/nfs
    ip netns exec "$1" unshare --pid --fork --kill-child --mount --mount-proc --uts sh -c \
        "hostname $1; mount -t nfs -o $options 10.78.0.1:$path /shared && cd $PWD && $3"
}

# 2.
echo "== local: $(date +%T)"
$python -m jobs run /tmp/small.yaml run=/tmp/local $overrides >/tmp/local.log 2>&1; echo "exit code $?"
for version in "$@"; do
    echo "== NFS $version: $(date +%T)"
    mkdir -p /srv/nfs/probes-$version
    on a $version "$python -m tests.support.nfs_probes first /shared/probes-$version" &
    on b $version "$python -m tests.support.nfs_probes second /shared/probes-$version"
    wait $!
    run=run-$version
    on a $version "grep ' /shared ' /proc/mounts; exec $python -m jobs run /tmp/small.yaml run=/shared/$run $overrides" >/tmp/a.log 2>&1 &
    client=$!
    until grep -qs '"step": 1[2-9]' /srv/nfs/$run/pretrain-*/metrics.jsonl || ! kill -0 $client 2>/dev/null; do sleep 0.2; done
    on b $version "$python -m jobs status /shared/$run" 2>&1 | tail -n 4
    ip netns pids a | xargs kill -KILL; wait $client
    grep ' /shared ' /tmp/a.log
    on b $version "exec $python -m jobs run /tmp/small.yaml run=/shared/$run $overrides" >/tmp/b.log 2>&1
    echo "the same command on host b: exit code $?"
    grep -E "has not renewed its lease|resumed|restored|for a lease renewal" /tmp/b.log
    $python - <<EOF
from pathlib import Path
from tests.support.drives import assert_same
assert_same(Path("/srv/nfs/$run"), Path("/tmp/local"))
print("NFS $version: Same")
EOF
done
