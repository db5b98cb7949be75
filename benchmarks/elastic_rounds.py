"""Rounds of faults on elastic jobs: what is lost, repeated or wrong afterwards, and how long a recovery takes.

``python benchmarks/elastic_rounds.py --rounds 40`` on this machine. Each round trains ``tests/elastic_job.py`` with
faults at random moments (``--seed`` repeats them). Workers are killed, stopped for good or for a moment, one after the
other, two at once, or one while the others recover from the loss of another; the first rank as often as any. What is
checked after each round is in ``tests/elastic_play.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from elastic_play import Round, Work, check, train_alone


def main() -> int:
    """Play the rounds, say what went wrong, and return 1 if anything did."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--replacements", type=int, default=0, help="how many lost workers come back in each round")
    parser.add_argument("--epochs", type=int, default=6, help="more give workers time to come back")
    parser.add_argument("--balance", action="store_true", help="workers of different speeds share batches by speed")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one round")
    parser.add_argument("--keep", type=Path, help="folder for the notes of rounds that went wrong")
    arguments = parser.parse_args()
    wrong, faults, recoveries = 0, 0, []
    with tempfile.TemporaryDirectory() as scratch:
        expected = train_alone(Work(epochs=arguments.epochs), Path(scratch, "alone"))
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            work = Work(
                workers=arguments.workers,
                mode=("wrapper", "distribute")[seed % 2],
                epochs=arguments.epochs,
                replacements=arguments.replacements,
                pause_s=0.0 if arguments.balance else 0.05,
                pace_s=0.01 if arguments.balance else 0.0,
            )
            folder = Path(arguments.keep or scratch, f"round-{seed}")
            outcome = Round(work, folder, seed).play(arguments.limit)
            outcome.problems += check(folder, work, expected)
            faults += len(outcome.faults)
            recoveries += outcome.recoveries_s
            took = ", ".join(f"{each:.2f}" for each in outcome.recoveries_s)
            print(f"round {seed} ({work.mode}): {' '.join(outcome.faults)}; recovered in {took} s", flush=True)
            for problem in outcome.problems:
                print(f"  WRONG: {problem}", flush=True)
            wrong += bool(outcome.problems)
    summary = {"rounds": arguments.rounds, "faults": faults, "wrong": wrong}
    if recoveries:
        summary |= {"median_s": round(statistics.median(recoveries), 2), "worst_s": round(max(recoveries), 2)}
    print(json.dumps(summary))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
