# Sourced by the scripts beside it: finds Python and Poseidon, and says where results go.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
results=${RESULTS:-benchmarks/results}
# Sets models to the arguments before "--", if there are any, and options to those behind it.
read_arguments() {
    local asked=()
    while [ $# -gt 0 ] && [ "$1" != -- ]; do asked+=("$1"); shift; done
    if [ ${#asked[@]} -gt 0 ]; then models=("${asked[@]}"); fi
    options=("${@:2}")
}
bench() { "$PYTHON" -m poseidon.cli bench "$@"; }
