#!/usr/bin/env bash
# Simulates several machines on one computer. Each machine is a network namespace with its own address and
# host name, and all machines are connected to one switch. They share the disk, like nodes with a shared file
# system. Requires root and iproute2.
#
#   machines.sh up NAME...            create machines: 10.77.0.1, 10.77.0.2, ... in this order
#   machines.sh run NAME COMMAND...   run a command on a machine, with the environment of the caller
#   machines.sh shell NAME COMMAND... run a command like ssh: in a new environment, as one line for sh
#   machines.sh cut NAME              disconnect a machine; `shell` then hangs, like ssh to a dead host
#   machines.sh hide NAME FOLDER      replace a folder by an empty folder on this machine
#   machines.sh down NAME...          remove the machines of one `up`, in the same order
#
# Example: a job with 2 ranks on one machine and 1 rank on another, started on the first machine:
#
#   m=crates/deepburn-launch/tests/machines.sh
#   $m up one two
#   printf 'one slots=2\ntwo slots=1\n' > hosts
#   $m run one deepburn launch --hostfile hosts --remote-shell "$PWD/$m shell" -- finetune job.yaml
#   $m down one two
#
# Names have at most 20 letters, digits and `-`. Namespaces have the names of the machines, so there must not
# be a namespace with the same name.
set -euo pipefail

fail() {
    echo "machines.sh: $*" >&2
    exit 1
}

usage() {
    sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"
    exit 2
}

# The settings folder of a machine. `ip netns exec` mounts its files over the files in /etc.
settings() {
    echo "/etc/netns/$1"
}

# The file with the folders that are hidden from a machine, one per line.
hidden() {
    echo "/run/machines/$1.hidden"
}

switch() {
    echo "$1-switch"
}

check() {
    [[ $1 =~ ^[a-z][a-z0-9-]{0,19}$ ]] || fail "bad name: $1; use at most 20 of a-z, 0-9 and -"
}

up() {
    [ "$(id -u)" -eq 0 ] || fail "up: root is needed"
    local name number=0 hub
    for name in "$@"; do
        check "$name"
        ! ip netns pids "$name" > /dev/null 2>&1 || fail "up: $name exists; machines.sh down $*"
    done
    hub=$(switch "$1")
    # Remove an incomplete network on errors.
    trap 'down "$@"' ERR
    ip netns add "$hub"
    ip -n "$hub" link add name bridge type bridge
    ip -n "$hub" link set bridge up
    for name in "$@"; do
        number=$((number + 1))
        ip netns add "$name"
        ip link add "port$number" netns "$hub" type veth peer name eth0 netns "$name"
        ip -n "$hub" link set "port$number" master bridge
        ip -n "$hub" link set "port$number" up
        ip -n "$name" addr add "10.77.0.$number/24" dev eth0
        ip -n "$name" link set lo up
        ip -n "$name" link set eth0 up
        mkdir -p "$(settings "$name")"
        hosts "$@" > "$(settings "$name")/hosts"
    done
    trap - ERR
}

# Prints the contents of /etc/hosts of a machine.
hosts() {
    local name number=0
    echo "127.0.0.1 localhost"
    for name in "$@"; do
        number=$((number + 1))
        echo "10.77.0.$number $name"
    done
}

down() {
    local name
    for name in "$@" "$(switch "$1")"; do
        check "${name%-switch}"
        ip netns delete "$name" 2> /dev/null || true
        rm -rf "$(settings "$name")" "$(hidden "$name")"
    done
}

# Replaces this process by a command on a machine, with its network, host name and hidden folders.
enter() {
    local name=$1
    shift
    exec ip netns exec "$name" unshare --uts sh -c '
        hostname "$0"
        if [ -f "$1" ]; then
            while read -r folder; do mount -t tmpfs hidden "$folder"; done < "$1"
        fi
        shift
        exec "$@"' "$name" "$(hidden "$name")" "$@"
}

shell() {
    local name=$1
    shift
    check "$name"
    ip netns pids "$name" > /dev/null 2>&1 || fail "connect to host $name: no such machine"
    ! ip -n "$name" link show eth0 | grep -q 'state DOWN' || exec sleep infinity
    enter "$name" env -i PATH="$PATH" HOME="${HOME:-/}" sh -c "$*"
}

hide() {
    [ -d "$2" ] || fail "hide: $2 is not a folder; name one"
    mkdir -p /run/machines
    realpath "$2" >> "$(hidden "$1")"
}

[ $# -ge 2 ] || usage
action=$1
shift
case $action in
    up) up "$@" ;;
    run) enter "$@" ;;
    shell) shell "$@" ;;
    cut) ip -n "$1" link set eth0 down ;;
    hide) hide "$@" ;;
    down) down "$@" ;;
    *) usage ;;
esac
