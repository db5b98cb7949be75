# Sourced by the scripts beside it: finds Python and Poseidon, and says where results go.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; fi
fi
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
results=${RESULTS:-benchmarks/results}
bench() { "$PYTHON" -m poseidon.launch.cli bench "$@"; }
