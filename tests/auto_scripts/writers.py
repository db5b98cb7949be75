"""Write files in every way that a script may; each worker writes its number and must read it back.

writers.py [names of the ways; default: all]
"""

import io
import logging
import os
import pathlib
import shutil
import sqlite3
import subprocess
import sys
import tarfile
import tempfile
import zipfile

import h5py
import numpy
import torch

ELSEWHERE = tempfile.gettempdir()


def by_open(me):
    os.makedirs("runs/1")  # fails if another worker's is seen
    with open("runs/1/a.txt", "w") as file:
        file.write(me)
    with open("runs/1/a.txt") as file:
        return file.read()


def by_exclusive_open(me):
    with open("exclusive.txt", "x") as file:
        file.write(me)
    return pathlib.Path("exclusive.txt").read_text()


def by_pathlib(me):
    path = pathlib.Path("pathlib")
    path.mkdir()
    (path / "draft").write_text(me)
    (path / "draft").rename(path / "final")
    assert [one.name for one in path.iterdir()] == ["final"]
    return (path / "final").read_text()


def by_descriptor(me):
    number = os.open("descriptor.txt", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    os.write(number, me.encode())
    os.close(number)
    return pathlib.Path("descriptor.txt").read_text()


def by_move_from_elsewhere(me):
    # As Lightning's ModelCheckpoint: written in a temporary folder, then moved over the last one.
    for text in ("first", me):
        folder = tempfile.mkdtemp()
        file = os.path.join(folder, "last.ckpt")
        with open(file, "w") as stream:
            stream.write(text)
        shutil.move(file, "last.ckpt")
        os.rmdir(folder)
    return pathlib.Path("last.ckpt").read_text()


def by_rename_from_elsewhere(me):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "file")
        with open(path, "w") as stream:
            stream.write(me)
        os.rename(path, "renamed.txt")
    return pathlib.Path("renamed.txt").read_text()


def by_temporary_file_beside(me):
    number, name = tempfile.mkstemp(dir=".")
    with os.fdopen(number, "w") as stream:
        stream.write(me)
    os.replace(name, "replaced.txt")
    return pathlib.Path("replaced.txt").read_text()


def by_folders(me):
    shutil.copytree("old", "copied")
    pathlib.Path("copied/a.txt").write_text(me)
    shutil.move("copied", "moved")
    shutil.copytree("moved", "short-lived")
    shutil.rmtree("short-lived")
    assert not os.path.exists("copied")
    assert sorted(os.listdir("moved")) == ["a.txt", "large.bin", "train.log"]
    return pathlib.Path("moved/a.txt").read_text()


def by_old_folder(me):
    # A folder of an earlier run is renamed and written anew.
    os.rename("earlier", "earlier.bak")
    os.mkdir("earlier")
    pathlib.Path("earlier/a.txt").write_text(me)
    assert pathlib.Path("earlier.bak/a.txt").read_text() == "earlier"
    return pathlib.Path("earlier/a.txt").read_text()


def by_link(me):
    pathlib.Path("linked.txt").write_text(me)
    os.link("linked.txt", "hard.txt")
    os.symlink("linked.txt", "soft.txt")
    assert pathlib.Path("hard.txt").read_text() == me
    return pathlib.Path("soft.txt").read_text()


def by_tarfile(me):
    content = me.encode()
    with tarfile.open("data.tar", "w") as tar:
        entry = tarfile.TarInfo("unpacked/x.txt")
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    with tarfile.open("data.tar") as tar:
        tar.extractall(".", filter="data")
    return pathlib.Path("unpacked/x.txt").read_text()


def by_zipfile(me):
    with zipfile.ZipFile("data.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo("unzipped/x.txt"), me)
    with zipfile.ZipFile("data.zip") as archive:
        archive.extractall()
    return pathlib.Path("unzipped/x.txt").read_text()


def by_sqlite(me):
    for name in ("new.db", "old.db"):
        base = sqlite3.connect(name)
        base.execute(f"create table {name[:3]} (text)")
        base.execute(f"insert into {name[:3]} values (?)", (me,))
        base.commit()
        base.close()
    base = sqlite3.connect("old.db")
    assert base.execute("select * from kept").fetchall() == [("kept",)]
    ((text,),) = base.execute("select * from old").fetchall()
    base.close()
    return text


def by_hdf5(me):
    with h5py.File("data.h5", "a") as file:
        file["who"] = [int(me)]
    with h5py.File("data.h5", "r+") as file:
        return str(file["who"][0])


def by_memmap(me):
    values = numpy.memmap("values.bin", dtype="int64", mode="w+", shape=4)
    values[:] = int(me)
    values.flush()
    numpy.save("array.npy", numpy.full(3, int(me)))
    assert numpy.load("array.npy", mmap_mode="r")[0] == int(me)
    old = numpy.memmap("old/large.bin", dtype="uint8", mode="r+")
    assert not old.any()
    old[7] = int(me) + 1
    old.flush()
    del old
    assert numpy.fromfile("old/large.bin", dtype="uint8")[7] == int(me) + 1
    return str(numpy.fromfile("values.bin", dtype="int64")[0])


def by_programs(me):
    subprocess.run(f"mkdir shell && echo -n {me} > shell/a.txt && cp -r shell shell2", shell=True, check=True)
    subprocess.run(["mv", "shell2/a.txt", "from-shell.txt"], check=True)
    subprocess.run([sys.executable, "-c", f"open('from-python.txt', 'x').write('{me}')"], check=True)
    assert pathlib.Path("from-python.txt").read_text() == me
    return pathlib.Path("from-shell.txt").read_text()


def by_torch(me):
    torch.save(torch.tensor(int(me)), "model.pt")
    return str(torch.load("model.pt").item())


def by_log(me):
    handler = logging.FileHandler("old/train.log")
    handler.emit(logging.makeLogRecord({"msg": f"worker {me}"}))
    handler.close()
    first, second = pathlib.Path("old/train.log").read_text().splitlines()
    assert first == "earlier"
    return second.removeprefix("worker ")


def by_tokenizers(me):
    tokenizers = __import__("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({me: 0}, unk_token=me))
    tokenizer.save("tokenizer.json")
    return next(iter(tokenizers.Tokenizer.from_file("tokenizer.json").get_vocab()))


def by_safetensors(me):
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.tensor([int(me)])}, "model.safetensors")
    return str(load_file("model.safetensors")["a"].item())


def by_absolute_path(me):
    # Outside the working directory, under a name that all workers use.
    path = pathlib.Path(ELSEWHERE) / f"poseidon-test-{pathlib.Path.cwd().parent.name}.txt"
    path.write_text(me)
    text = path.read_text()
    path.unlink()
    return text


WAYS = {name: value for name, value in globals().items() if name.startswith("by_")}


def number_of_worker():
    # The variables of the job are hidden from scripts, but not from one that insists.
    words = pathlib.Path("/proc/self/environ").read_bytes().split(b"\0")
    return next((word[5:].decode() for word in words if word.startswith(b"RANK=")), "0")


if __name__ == "__main__":
    me = number_of_worker()
    for name in sys.argv[1:]:
        seen = WAYS[name](me)
        assert seen == me, (name, me, seen)
    print("worker", me, "is done")
