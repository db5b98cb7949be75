"""Run scripts on one GPU plain and with ``--auto`` on two emulated machines that share it, and print a table.

    python tests/peers/on_gpu.py [SCRIPT ...]

Needs root, a GPU and what the scripts import; a script whose library is missing is left out and named. A script is
``equal`` if two workers end as one does, ``told`` if its workers say how their result differs, or refuse.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "src"), str(HERE)]

from compare import IN_A_FOLDER  # noqa: E402

from poseidon.lab import Lab, gpu  # noqa: E402
from poseidon.lab.job import Job, JobOptions  # noqa: E402

EXACT, DIVIDED, FEW_BITS = 1e-4, 1e-3, 2e-2
"""Tolerances: sums in another order; behind optimizers that divide by small numbers; in half precision."""
SAYING = ("averages of each worker's part", "nothing is shared", "is not what one machine", "cannot")
"""What is said where a result differs from one machine's."""
SCRIPTS: tuple[tuple[float, str], ...] = (
    (EXACT, "digits_convnet.py"),
    (DIVIDED, "min_gpt_trainer.py"),
    (EXACT, "cifar_resnet.py"),
    (EXACT, "dcgan_pair.py"),
    (EXACT, "dlrm_ads.py"),
    (DIVIDED, "unet_carvana.py float32"),
    (FEW_BITS, "unet_carvana.py"),
    (DIVIDED, "ema_one_cycle.py"),
    (EXACT, "compiled.py model"),
    (EXACT, "compiled.py loss"),
    (EXACT, "hf_trainer.py classes 1"),
    (FEW_BITS, "hf_trainer.py words 2 bf16"),
    (FEW_BITS, "hf_trainer.py words 2 fp16"),
    (EXACT, "hf_trainer.py words 2 ragged"),
    (EXACT, "lightning_fit.py"),
    (EXACT, "accelerate_loop.py"),
    (EXACT, "cuda_habits.py"),
    (EXACT, "cuda_habits.py prefetch"),
    (EXACT, "cuda_habits.py norm"),
    (FEW_BITS, "cuda_habits.py fp16 fused"),
    (FEW_BITS, "cuda_habits.py bf16 prefetch fused"),
    (FEW_BITS, "cuda_habits.py bf16 compile"),
    (EXACT, "cuda_habits.py resident"),
    (EXACT, "cuda_habits.py redrawn"),
    (EXACT, "cuda_habits.py graph"),
)
LIMIT_S = 90.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "PEER_DEVICE": "cuda",
    # With TF32, which convolutions use unasked, half a batch rounds differently in the third digit.
    "NVIDIA_TF32_OVERRIDE": "0",
    "PYTHONPATH": os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE), os.environ.get("PYTHONPATH", "")]),
}


def run_plain(words: list[str], folder: Path) -> tuple[dict[str, Any] | None, str]:
    """Return what a plain run saved, or None and what it said."""
    folder.mkdir(parents=True)
    command = [sys.executable, str(HERE / words[0]), *words[1:]]
    env = {**os.environ, **ENVIRONMENT}
    try:
        ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return None, f"did not end in {LIMIT_S:g} s"
    return (torch.load(folder / "result.pt") if ended.returncode == 0 else None), ended.stderr


def run_shared(lab: Lab, options: JobOptions, words: list[str], folder: Path) -> tuple[list[dict[str, Any]], str]:
    """Return what each worker saved, and all that they said."""
    folder.mkdir(parents=True)
    (folder / "apart.py").write_text(IN_A_FOLDER)
    os.chdir(folder)  # where the workers start
    command = [sys.executable, "-m", "poseidon.auto", "--batch", "total", "--files", "shared", "apart.py"]
    said: list[str] = []
    job = Job(
        lab,
        [*command, str(HERE / words[0]), *words[1:]],
        options,
        {**os.environ, **ENVIRONMENT},
        lambda place, line: said.append(f"{place.label} | {line}"),
    )
    result = job.run()
    saved = [torch.load(path) for path in sorted(folder.glob("*/result.pt"))]
    if result.status:
        said.append(f"status {result.status}: {result.reason}")
        saved = []
    return saved, "\n".join(said)


def judge(plain: dict[str, Any], ours: list[dict[str, Any]], said: str, tolerance: float) -> str:
    """Return how two workers' results compare with one's."""
    told = [line for line in said.splitlines() if "poseidon" in line.lower()]
    if not ours:
        return f"ENDED: {told[-1] if told else said[-800:]}"
    wrong = []
    for one in ours:
        if one["steps"] != plain["steps"]:
            wrong.append(f"{one['steps']} steps, not {plain['steps']}")
        for name, limit, other in (
            ("losses", tolerance, plain),
            ("model", tolerance, plain),
            ("model", 0.0, ours[0]),
        ):
            try:
                torch.testing.assert_close(one[name], other[name], rtol=limit, atol=limit)
            except AssertionError as error:
                text = " ".join(str(error).split())
                wrong.append(f"{name} {'of the workers ' if other is ours[0] else ''}differ: {text[:160]}")
    together = Counter(index for one in ours for index in one["seen"])
    if Counter(plain["seen"]) != together and plain["seen"]:
        wrong.append(f"samples: {together.total()} read, not {len(plain['seen'])}")
    if not wrong:
        return "equal" if len(ours) == 2 else f"WRONG: {len(ours)} workers"
    notes = [line for line in told if any(words in line for words in SAYING)]
    return f"{'told' if notes else 'WRONG'}: {'; '.join(dict.fromkeys(wrong))} | {' / '.join(notes or told)[:600]}"


def main(chosen: list[str]) -> int:
    """Run the chosen scripts, or all; return how many were wrong."""
    scripts = [(limit, text.split()) for limit, text in SCRIPTS if not chosen or {text, text.split()[0]} & {*chosen}]
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(6) as pool:
        plain = [pool.submit(run_plain, words, Path(place, f"plain{n}")) for n, (_, words) in enumerate(scripts)]
        for one in plain:
            one.result()
        with Lab(machines=2, rate="10gbit") as lab, gpu.sharing(lab.name) as mps:
            options = JobOptions(share_gpu=True, mps_folder=mps, timeout_s=LIMIT_S)
            for number, (tolerance, words) in enumerate(scripts):
                saved, text = plain[number].result()
                began = time.monotonic()
                if saved is None:
                    verdict = f"left out: {text.strip().splitlines()[-1] if text.strip() else 'no result'}"
                else:
                    ours, said = run_shared(lab, options, words, Path(place, f"shared{number}"))
                    verdict = judge(saved, ours, said, tolerance)
                counts[verdict.split(":")[0]] += 1
                print(f"{' '.join(words):<40} {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
        os.chdir("/")
    print(dict(counts))
    return counts["WRONG"] + counts["ENDED"]


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
