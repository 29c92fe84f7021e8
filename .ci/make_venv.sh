#!/bin/sh
# make_venv.sh FOLDER UV_PIP_ARGUMENTS...: the environment of `make`. Looks first for what this
# machine lacks. Whatever fails ends in one sentence that says what to do; all that pip and uv say
# is in build/venv.log. PYTHON names the interpreter; pip and uv read their own variables.
set -u
venv=$1 log=build/venv.log needed=6  # GB; without caches 4
shift

fail() {
    echo "$@" >&2
    exit 1
}

use="install Python 3.11, 3.12 or 3.13 and name it, as in make demo PYTHON=python3.12"
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "PYTHON=$PYTHON does not run: $use."
case $version in
3.11 | 3.12 | 3.13) ;;
*) fail "PYTHON=$PYTHON is Python $version, which vLLM does not run on: $use." ;;
esac
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "PYTHON=$PYTHON cannot make environments: install its module venv (Debian and Ubuntu: apt-get install python$version-venv)."
headers=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
# The tests need them, the rest does not; tests/run.py refuses.
command -v "${CXX:-g++}" >/dev/null && [ -e "$headers/Python.h" ] ||
    echo "Before make test, install what torch compiles with, ${CXX:-g++} and $headers/Python.h (Debian and Ubuntu: apt-get install g++ python$version-dev)." >&2

# An environment that was broken off, or whose interpreter is gone, is made anew. One that somebody
# else made is not: it may be theirs.
found=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
ours() { [ -e "$venv/.unfinished" ] || [ -e "$venv/.ready" ]; }
if [ -e "$venv/.unfinished" ] || [ "$found" != "$version" ]; then
    [ -z "$found" ] || ours ||
        fail "$venv is an environment of Python $found that make did not make: move it away, or name a Python $found with PYTHON=."
    [ ! -e "$venv" ] || ours || [ -e "$venv/pyvenv.cfg" ] || [ -L "$venv/bin/python" ] ||
        fail "$venv is there and is no environment of Python: move it away."
    room=$(df -Pk . | awk 'NR == 2 { print int($4 / 1048576) }')
    [ "$room" -ge "$needed" ] ||
        fail "The disk of $(pwd) has $room GB left, and $venv needs $needed GB: make room."
    rm -rf "$venv"
    mkdir -p "$venv" && touch "$venv/.unfinished" || fail "$venv cannot be written: see who may write to $(pwd)."
fi

mkdir -p build
echo "Installing everything for CPU in $venv: a few minutes the first time. What pip and uv say is in $log."
python=$venv/bin/python
install() {
    "$PYTHON" -m venv "$venv" &&
        PIP_RETRIES=${PIP_RETRIES:-2} "$python" -m pip install --quiet --disable-pip-version-check uv &&
        "$venv/bin/uv" pip install --quiet --compile-bytecode --python "$python" "$@"
}
if ! install "$@" >"$log" 2>&1; then
    why=$(grep -iE 'error|no solution|cause|no space' "$log" | tail -1 | sed -E 's/^[^[:alnum:]]*(cause: )?//')
    fail "Nothing runs before $venv is complete, and this failed: ${why:-$(tail -1 "$log")}; look in $log, check the network or what PIP_INDEX_URL, UV_INDEX_URL and PIP_FIND_LINKS name, and run make again."
fi
rm -f "$venv/.unfinished"
touch "$venv/.ready"
