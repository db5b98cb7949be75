"""Run scripts with other people's trainers plain and on several workers, and compare: ``scripts/peers`` calls it.

Under ``--auto`` the result is that of the plain run. Scripts whose trainer distributes them run as they are, too: with
Poseidon in the place of torch's class the result is that with torch's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
ALL = (
    ("timm_loop.py",),
    ("hf_trainer.py", "classes", "1"),
    ("hf_trainer.py", "words", "2"),
    ("hf_trainer.py", "words", "2", "bf16", "lora"),
    ("hf_trainer.py", "words", "2", "fp16"),
    ("hf_trainer.py", "words", "2", "ragged"),
    ("hf_trainer.py", "words", "1", "ragged", "lora"),
    ("hf_trainer.py", "classes", "2", "ragged", "bf16"),
    ("trl_sft.py", "1"),
    ("trl_sft.py", "2", "bf16"),
    ("trl_sft.py", "2", "lora"),
    ("lightning_fit.py",),
    ("lightning_fit.py", "accumulate", "middle"),
    ("accelerate_loop.py",),
)
DISTRIBUTED = (
    ("timm_loop.py",),
    ("hf_trainer.py", "classes", "1"),
    ("hf_trainer.py", "words", "2", "bf16"),
    ("hf_trainer.py", "words", "2", "lora"),
    ("hf_trainer.py", "words", "2", "fp16"),
    ("hf_trainer.py", "words", "2", "ragged"),
    ("trl_sft.py", "2"),
    ("trl_sft.py", "1", "lora"),
    ("accelerate_loop.py",),
)
"""Scripts that distribute themselves where a launcher started them."""
WRITING = (
    ("hf_trainer.py", "classes", "1", "kept"),
    ("hf_trainer.py", "words", "2", "lora", "kept"),
    ("lightning_fit.py", "accumulate", "kept"),
    ("accelerate_loop.py", "kept"),
    ("timm_loop.py",),
)
"""Scripts that write checkpoints: worker 0's are those of a plain run, and nobody else's are there."""
IN_A_FOLDER = """
import os, pathlib, runpy, sys
folder = pathlib.Path(str(os.getpid())); folder.mkdir(); os.chdir(folder)
sys.argv = sys.argv[1:]; sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script in a folder of each worker's own."""
COMMAND = "import sys; from poseidon.cli.main import main; sys.exit(main())"


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder, offline; return what it wrote to stderr."""
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
    }
    if any(word.endswith("timm_loop.py") for word in command) and "VISION" in environ:
        # Apart, because everybody else imports torchvision where it is, and it has no operators without CUDA.
        environ["PYTHONPATH"] = os.pathsep.join([environ.get("PYTHONPATH", ""), environ["VISION"]])
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, stderr=subprocess.PIPE, text=True, timeout=900
    )
    assert ended.returncode == 0, f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-4000:]}"
    return ended.stderr


def results(folder: Path, words: tuple[str, ...], size: int) -> list[dict[str, Any]]:
    """Return what each of ``size`` workers saved, or what a plain run saved."""
    folder.mkdir()
    script = [str(HERE / words[0]), *words[1:]]
    if size == 1:
        run(folder, *script)
        return [torch.load(folder / "result.pt")]
    (folder / "apart.py").write_text(IN_A_FOLDER)
    options = ["--nproc", str(size), "--quiet", "--auto", "--batch", "total", "--files", "shared"]
    run(folder, "-c", COMMAND, "run", *options, "apart.py", *script)
    return [torch.load(path) for path in sorted(folder.glob("*/result.pt"))]


def check(words: tuple[str, ...], folder: Path) -> None:
    """Compare one script on 2 and 3 workers with its plain run."""
    (plain,) = results(folder / "plain", words, 1)
    tolerance = 1e-3 if {"bf16", "fp16"} & set(words) else 2e-5
    for size in (2, 3):
        ours = results(folder / str(size), words, size)
        assert len(ours) == size
        for one in ours:
            assert one["steps"] == plain["steps"], (one["steps"], plain["steps"])
            torch.testing.assert_close(one["losses"], plain["losses"], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(one["model"], plain["model"], rtol=tolerance, atol=tolerance)
            torch.testing.assert_close(one["model"], ours[0]["model"], rtol=0.0, atol=0.0)
        once = Counter(plain["seen"])
        together = Counter(index for one in ours for index in one["seen"])
        assert not once - together, f"not seen: {once - together}"
        # A worker that gets a single sample of a last batch doubles it; that happens once per epoch at most.
        assert (together - once).total() <= (3 if size == 3 else 0), f"seen twice: {together - once}"
        print(f"{' '.join(words)}: {size} workers equal one, {len(plain['seen'])} samples", flush=True)


def check_distributed(words: tuple[str, ...], folder: Path) -> None:
    """Compare a script that distributes itself, with Poseidon in the place of torch's class, with torch's class."""
    found = {}
    for option in ("--no-as-ddp", "--as-ddp"):
        place = folder / option.lstrip("-")
        place.mkdir()
        (place / "apart.py").write_text(IN_A_FOLDER)
        script = [str(HERE / words[0]), *words[1:]]
        err = run(place, "-c", COMMAND, "run", "--nproc", "2", "--quiet", option, "apart.py", *script)
        found[option] = [torch.load(path) for path in sorted(place.glob("*/result.pt"))]
        assert len(found[option]) == 2
        told = re.search(r"poseidon as DDP: \w+, ([\d,]+)(?: of ([\d,]+))? parameters", err)
        assert (told is not None) == (option == "--as-ddp"), err
        if told is not None and "lora" in words:
            assert told[2] is not None, f"more than adapters travel: {told[0]}"
    tolerance = 2e-2 if {"bf16", "fp16"} & set(words) else 2e-5
    ours, theirs = (sorted(found[name], key=lambda one: one["seen"]) for name in ("--as-ddp", "--no-as-ddp"))
    for one, other in zip(ours, theirs, strict=True):
        assert (one["steps"], one["seen"]) == (other["steps"], other["seen"])
        torch.testing.assert_close(one["losses"], other["losses"], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(one["model"], other["model"], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(one["model"], ours[0]["model"], rtol=0.0, atol=0.0)
    print(f"{' '.join(words)}: 2 workers with Poseidon as torch's class equal 2 with torch's", flush=True)


def check_files(words: tuple[str, ...], folder: Path) -> None:
    """Compare the files that a script leaves on 2 workers, and their weights, with those of its plain run."""
    script = [str(HERE / words[0]), *words[1:]]
    plain, ours = folder / "plain", folder / "ours"
    plain.mkdir()
    run(plain, *script)
    ours.mkdir()
    run(ours, "-c", COMMAND, "run", "--nproc", "2", "--quiet", "--auto", "--batch", "total", *script)
    shutil.rmtree(ours / "runs")  # the launcher's own
    names, found = (sorted(str(path.relative_to(at)) for path in at.rglob("*")) for at in (plain, ours))
    assert found == names, f"files differ: {set(found) ^ set(names)}"
    weights = [name for name in names if name.endswith((".safetensors", ".ckpt", ".bin", ".pt", ".tar"))]
    weights = [name for name in weights if name != "result.pt"]  # has the samples that worker 0 has seen
    assert weights, names
    for name in weights:
        # Lightning names its best checkpoints by their whole paths.
        one, other = (
            {key.replace(str(at), "FOLDER"): tensor for key, tensor in _tensors(_load(at / name))}
            for at in (ours, plain)
        )
        assert one.keys() == other.keys(), f"{name}: {one.keys() ^ other.keys()}"
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    print(
        f"{' '.join(words)}: {len(names)} files of 2 workers are those of one, {len(weights)} with weights", flush=True
    )


def _load(path: Path) -> Any:
    from safetensors.torch import load_file

    return load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=False)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Give the tensors with values of what was saved, with their names; generators' states are worker 0's own."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _tensors(inner, f"{name}/{key}")
    elif isinstance(value, list | tuple):
        for key, inner in enumerate(value):
            yield from _tensors(inner, f"{name}/{key}")


def main(chosen: list[str]) -> int:
    """Run the chosen scripts, or all, and return how many went wrong."""
    wrong = 0
    for scripts, compare in ((ALL, check), (DISTRIBUTED, check_distributed), (WRITING, check_files)):
        for words in scripts:
            if chosen and words[0] not in chosen:
                continue
            with tempfile.TemporaryDirectory() as place:
                try:
                    compare(words, Path(place))
                except AssertionError as error:
                    wrong += 1
                    print(f"{' '.join(words)}: WRONG ({compare.__name__}): {error}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
