#!/bin/sh
# Runs all tests, those in the documentation too. They start the Postgres servers that they need,
# on free ports and in temporary directories, and leave none behind. Where the server's programs are
# missing and apt-get can be used, this installs them first.
#
#     ./test.sh                    everything
#     ./test.sh --test it i1_      what `cargo test` takes

set -eu
cd "$(dirname "$0")"

fail() {
    echo "test.sh: $*" >&2
    exit 1
}

# Whether a directory has the programs of a Postgres server.
has_server() {
    [ -x "$1/initdb" ] && [ -x "$1/postgres" ] && [ -x "$1/pg_ctl" ]
}

# The same places as in examples/support/throwaway.rs.
find_server() {
    if command -v initdb && command -v postgres && command -v pg_ctl; then
        return 0
    fi >/dev/null 2>&1
    if command -v pg_config >/dev/null 2>&1 && has_server "$(pg_config --bindir)"; then
        return 0
    fi
    for directory in /usr/lib/postgresql/*/bin /usr/local/opt/postgresql*/bin \
        /opt/homebrew/opt/postgresql*/bin /Applications/Postgres.app/Contents/Versions/*/bin; do
        if has_server "$directory"; then
            return 0
        fi
    done
    return 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        env DEBIAN_FRONTEND=noninteractive "$@"
    else
        sudo -n env DEBIAN_FRONTEND=noninteractive "$@"
    fi
}

# Debian starts a server of its own with the package, unless its settings say no. They are put back
# afterwards.
install_server() {
    settings=/etc/postgresql-common/createcluster.conf
    as_root apt-get update -qq
    as_root apt-get install -qq -y --no-install-recommends postgresql-common
    as_root cp "$settings" "$settings.before-tests"
    as_root sh -c "echo 'create_main_cluster = false' >>'$settings'"
    installed=0
    as_root apt-get install -qq -y --no-install-recommends postgresql || installed=$?
    as_root mv "$settings.before-tests" "$settings"
    return "$installed"
}

command -v cargo >/dev/null 2>&1 ||
    fail "cargo is not installed: https://rustup.rs says how, then open a new shell"

if ! find_server; then
    command -v apt-get >/dev/null 2>&1 ||
        fail "no Postgres server here, install one (macOS: brew install postgresql) and run this again"
    [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null ||
        fail "no Postgres server here, and no right to install one: sudo apt-get install postgresql"
    echo "test.sh: no Postgres server here: installing the package postgresql"
    install_server || fail "the package postgresql could not be installed, apt-get says why"
    find_server || fail "the package postgresql is installed, and its programs are nowhere"
fi

exec cargo test --locked --all-features "$@"
