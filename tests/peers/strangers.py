"""Run scripts in the manner of many authors plain and on several workers, and print a table: ``scripts/peers``.

Each script of :data:`STRANGERS` saves what it trained, its evaluation losses and the training samples it read. With
``--batch total`` all workers together must give the same, and must have read every sample as often as one does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

HERE = Path(__file__).parent
NOTHING_SHARED = "nothing is shared"


@dataclass(frozen=True)
class Stranger:
    """A script, and what several workers shall make of it."""

    script: str
    fate: Literal["dealt", "whole", "refused", "told"] = "dealt"
    """Batches are divided; there is no loader, and all workers do the same; it ends; or it says how it differs."""
    tolerance: float = 2e-5
    """Greatest relative or absolute difference: the same sums in another order, carried through dozens of steps."""
    words: tuple[str, ...] = ()
    """Arguments."""
    whole: int = 0
    """Samples of a pass that is not for training, which every worker reads as a whole."""
    says: str = ""
    """What is said on standard error."""

    @property
    def name(self) -> str:
        """The script with its arguments."""
        return " ".join((self.script, *self.words))


FEW_BITS = 1e-2
"""bfloat16 has 8 bits."""
DIVIDED = 2e-4
"""Adam and its kin divide by small numbers."""

MEANS = ("selected", "criterion", "smooth", "masked", "clamped", "weighted", "dotted", "average", "bce", "nan")
"""What a loss of ``masked_means.py`` is a mean over."""
MEETINGS = {
    "nt_xent": "compared with each other",
    "clip": "compared with each other",
    "triplet": "compared with each other",
    "rmse": "the sqrt of a sum or mean",
    "dice": "the quotient of a sum or mean",
    "barlow": "the std of a batch's samples",
}
"""Losses of ``whole_batch.py`` in which samples meet, and what is said."""
MEMORIES = ("bank", "centres")
"""What ``memory_of_samples.py`` fills in a buffer."""

STRANGERS = (
    Stranger("digits_convnet.py"),
    Stranger("word_language_model.py", "whole"),
    Stranger("sine_waves_lbfgs.py", "whole", 1e-9),
    Stranger("gcn_nodes.py", "whole"),
    Stranger("vae_sums.py"),
    Stranger("dcgan_pair.py"),
    Stranger("siamese_pairs.py", tolerance=DIVIDED),
    Stranger("actor_critic.py", "whole"),
    Stranger("super_resolution.py"),
    Stranger("neural_style.py", tolerance=DIVIDED),
    Stranger("polynomial.py", "whole"),
    Stranger("hogwild.py", "refused", words=("fork",), says="a process that the script started trains by itself"),
    Stranger("hogwild.py", "refused", words=("spawn",), says="nothing was averaged"),
    Stranger("nano_gpt.py", "whole", DIVIDED),
    Stranger("min_gpt_trainer.py", tolerance=DIVIDED),
    Stranger("scalars_by_hand.py"),
    Stranger("callback_learner.py"),
    Stranger("make_names.py", tolerance=DIVIDED),
    Stranger("annotated_transformer.py", tolerance=DIVIDED),
    Stranger("unet_carvana.py", words=("float32",), tolerance=DIVIDED),
    Stranger("unet_carvana.py", tolerance=FEW_BITS),
    Stranger("detector_ema.py"),
    Stranger("cifar_resnet.py"),
    Stranger("dlrm_ads.py"),
    Stranger("word2vec_sparse.py", tolerance=DIVIDED),
    Stranger("molecules_gin.py"),
    Stranger("distillation.py"),
    Stranger("two_views.py"),
    Stranger("maml_sines.py", tolerance=DIVIDED),
    Stranger("streamed_lines.py", tolerance=DIVIDED),
    Stranger("dicts_padded.py"),
    Stranger("tabular_estimator.py"),
    Stranger("k_fold.py"),
    Stranger("sweep.py", tolerance=DIVIDED),
    Stranger("weighted_classes.py"),
    Stranger("stochastic_averages.py", whole=40),
    Stranger("two_kinds_of_optimizer.py", tolerance=DIVIDED),
    Stranger("growing_batches.py"),
    Stranger("half_precision_scaler.py", tolerance=FEW_BITS),
    Stranger("resumed.py", tolerance=DIVIDED),
    Stranger("ppo_rollouts.py", "whole"),
    Stranger("ema_one_cycle.py", tolerance=DIVIDED),
    Stranger("processes_kept.py", tolerance=DIVIDED),
    Stranger("drawn_by_weight.py"),
    *(Stranger("masked_means.py", words=(kind,)) for kind in MEANS),
    Stranger("masked_means.py", "told", words=("normed",), says="weights that add up to one"),
    *(Stranger("whole_batch.py", "told", words=(kind,), says=says) for kind, says in MEETINGS.items()),
    *(Stranger("everyday_habits.py", words=(habit,)) for habit in ("glance", "pairs", "moved", "halved")),
    Stranger("everyday_habits.py", "told", words=("hooked",), says="sees each worker's own gradient"),
    Stranger("gradient_penalty.py", tolerance=DIVIDED),
    Stranger("frozen_first.py"),
    Stranger("whole_data_lbfgs.py"),
    Stranger("stream_in_processes.py"),
    Stranger("compiled.py", words=("model",)),
    Stranger("compiled.py", words=("loss",)),
    Stranger("compiled.py", "told", words=("sum",), says="cannot be read from its graph"),
    Stranger("plateau_by_training.py", "refused", says="--same-loss"),
    Stranger("by_functions.py", "refused", words=("grad",), says="no backward followed"),
    Stranger("by_functions.py", "told", words=("func",), says="nothing was averaged"),
    Stranger("seq2seq_buckets.py", words=("batch",), tolerance=DIVIDED),
    Stranger("seq2seq_buckets.py", "told", words=("token",), says="drew more random numbers"),
    Stranger("ddpm_ema.py", tolerance=DIVIDED),
    Stranger("dqn_replay.py"),
    Stranger("detector_lists.py", words=("images",)),
    Stranger("detector_lists.py", words=("boxes",)),
    Stranger("neighbour_sampling.py", tolerance=DIVIDED),
    *(Stranger("memory_of_samples.py", "told", words=(kind,), says="its own samples") for kind in MEMORIES),
    Stranger("private_gradients.py", words=("mean",)),
    Stranger("private_gradients.py", "told", words=("expected",), says="as means over samples"),
    *(Stranger("checkpointed.py", words=(kind,)) for kind in ("reentrant", "not", "sequential")),
    *(Stranger("loader_each_epoch.py", words=(kind,)) for kind in ("split", "replacement", "tensors")),
    *(Stranger("endless_loader.py", words=(kind,)) for kind in ("repeat", "thread", "prefetch")),
    Stranger("speech_ctc.py", tolerance=DIVIDED),
    Stranger("sharpness_aware.py"),
    *(Stranger("several_backwards.py", words=(kind,)) for kind in ("vector", "pair", "kept", "scaled")),
    Stranger("several_backwards.py", "told", words=("summed",), says="cannot be read from its graph"),
    Stranger("stateful_lstm.py"),
    Stranger("half_labelled.py"),
    Stranger("subcommands.py", words=("train",), tolerance=DIVIDED),
)
WITH_LIBRARIES = (Stranger("fastai_learner.py", "whole"),)
"""Scripts that need a library of their own, and are run where they are chosen."""


@dataclass(frozen=True)
class Verdict:
    """What the workers' results are, next to a plain run's."""

    difference: float
    """Greatest difference of a parameter or loss, relative where it is above 1."""
    counted: str
    """Samples: of the plain run, and of all workers together."""
    problems: tuple[str, ...] = ()


def judge(stranger: Stranger, plain: Mapping[str, Any], ours: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compare what each worker saved with what a plain run saved."""
    problems = []
    difference = max(_difference(_numbers(one), _numbers(plain)) for one in ours)
    if not difference <= stranger.tolerance:
        problems.append(f"differs by {difference:.1e}, more than {stranger.tolerance:.0e}")
    apart = max(_difference(_numbers(one), _numbers(ours[0])) for one in ours)
    if apart > 0:
        problems.append(f"workers differ by {apart:.1e}")
    if any(one["steps"] != plain["steps"] for one in ours):
        problems.append(f"steps {[one['steps'] for one in ours]}, not {plain['steps']}")
    once = Counter(plain["seen"])
    together = Counter(index for one in ours for index in one["seen"])
    if stranger.fate == "dealt":
        # A worker that gets a single sample, or none, of a short batch repeats one: at most one each per step.
        repeated = (together - once).total() - stranger.whole * (len(ours) - 1)
        if once - together or repeated > len(ours) * plain["steps"] // 2:
            problems.append(f"unseen {(once - together).total()}, seen again {repeated}")
    return Verdict(difference, f"{once.total()} / {together.total()}", tuple(problems))


def _numbers(result: Mapping[str, Any]) -> list[torch.Tensor]:
    values = [torch.as_tensor(loss, dtype=torch.float64).reshape(-1) for loss in result["losses"]]
    return [*values, *(value.double().reshape(-1) for value in result["model"].values())]


def _difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> float:
    if [value.shape for value in ours] != [value.shape for value in theirs]:
        return float("inf")
    pairs = ((a - b).abs() / b.abs().clamp(min=1.0) for a, b in zip(ours, theirs, strict=True) if a.numel())
    return max((float(part.max()) for part in pairs), default=0.0)


def _run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, timeout=600, text=True, capture_output=True
    )


def _rows(stranger: Stranger, folder: Path, sizes: Sequence[int]) -> Iterator[tuple[str, ...]]:
    from compare import COMMAND, IN_A_FOLDER

    script = [str(HERE / stranger.script), *stranger.words]
    (folder / "plain").mkdir(parents=True)
    done = _run(folder / "plain", *script)
    if done.returncode:
        yield stranger.name, "1", "", "", f"WRONG: fails alone\n{done.stderr[-2000:]}"
        return
    for size in sizes:
        place = folder / str(size)
        place.mkdir()
        (place / "apart.py").write_text(IN_A_FOLDER)
        options = ["--nproc", str(size), "--auto", "--batch", "total", "--files", "shared"]
        done = _run(place, "-c", COMMAND, "run", *options, "apart.py", *script)
        yield stranger.name, str(size), *_conclude(stranger, done, folder / "plain", place, size)


def _conclude(
    stranger: Stranger, done: subprocess.CompletedProcess[str], alone: Path, place: Path, size: int
) -> tuple[str, str, str]:
    says = stranger.says or (NOTHING_SHARED if stranger.fate == "whole" else "")
    if says not in done.stderr + done.stdout:
        return "", "", f"WRONG: does not say {says!r}\n{done.stderr[-2000:]}"
    if stranger.fate == "refused":
        return "", "", f"told: {says!r}"
    if done.returncode:
        return "", "", f"WRONG: ends with {done.returncode}\n{done.stderr[-3000:]}"
    if stranger.fate == "told":
        return "", "", f"told: {says!r}"
    ours = [torch.load(path, weights_only=False) for path in sorted(place.glob("*/result.pt"))]
    if len(ours) != size:
        return "", "", f"WRONG: {len(ours)} results"
    found = judge(stranger, torch.load(alone / "result.pt", weights_only=False), ours)
    good = "equal" if stranger.fate == "dealt" else "equal; nothing shared, and said"
    return f"{found.difference:.1e}", found.counted, f"WRONG: {'; '.join(found.problems)}" if found.problems else good


def main(chosen: Sequence[str]) -> int:
    """Run the chosen scripts, or all, and return how many rows of the table are wrong."""
    wrong = 0
    print("| script | workers | greatest difference | samples: plain / all workers | verdict |\n|---|---|---|---|---|")
    for stranger in (*STRANGERS, *WITH_LIBRARIES):
        if stranger.script not in chosen if chosen else stranger in WITH_LIBRARIES:
            continue
        with tempfile.TemporaryDirectory() as place:
            for row in _rows(stranger, Path(place), (2, 3)):
                wrong += row[-1].startswith("WRONG")
                print(f"| {' | '.join(row)} |", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
