"""A small trained run and shards of random embeddings, for the scripts beside this file. Needs only Python's standard library."""
import random
import subprocess
from pathlib import Path

WIDTH = 12
# A float16 of which the first byte is one of these has a size between 0.5 and 1.
FIRST_BYTES = bytes((byte & 0x83) | 0x38 for byte in range(256))
SETTINGS = ["model.degree=8", "model.dropout=0", "loss.anchors=64", "train.steps=20", "train.global_batch=64", "train.warmup_steps=0",
            "shards.train=train", 'shards.test=""', 'shards.validation=""', "eval.every=0", "eval.after_train=false", "eval.anchors=grid",
            "eval.refine=false", "eval.grid_points=1000", "retrieval.head=knn"]


class SmallRun:
    """Works in `folder`, with the launcher at `launcher`."""

    def __init__(self, launcher, folder, seed=0, settings=()):
        self.launcher, self.folder, self.random = Path(launcher).resolve(), Path(folder), random.Random(seed)
        self.settings = SETTINGS + list(settings)
        table = ["id,lat,lon"]
        table += ["%d,%.4f,%.4f" % (row, self.random.uniform(-80, 80), self.random.uniform(-180, 180)) for row in range(512)]
        (self.folder / "table.csv").write_text("\n".join(table) + "\n")
        self.build("train", 512, "--table", "table.csv")
        self.run("--workers", "1", "train")

    def command(self, *words):
        """The command line that runs the launcher with `words`."""
        settings = [word for setting in self.settings for word in ("--set", setting)]
        return [str(self.launcher), "--device", "cpu", "--json", "--run", "small", *settings, *words]

    def run(self, *words):
        done = subprocess.run(self.command(*words), cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit("%s failed: %s" % (" ".join(words), done.stderr))

    def start(self, *words):
        return subprocess.Popen(self.command(*words), cwd=self.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def build(self, name, rows, *words):
        """Builds the shards `name` from random embeddings."""
        numbers = bytearray(2 * rows * WIDTH)
        numbers[0::2] = self.random.randbytes(rows * WIDTH)
        numbers[1::2] = self.random.randbytes(rows * WIDTH).translate(FIRST_BYTES)
        header = "{'descr': '<f2', 'fortran_order': False, 'shape': (%d, %d), }" % (rows, WIDTH)
        header = header.ljust(117) + "\n"
        matrix = self.folder / (name + ".npy")
        matrix.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + numbers)
        self.run("shards", "build", "--embeddings", matrix.name, "--out", name, *words)
        matrix.unlink()


def workers(launcher):
    """The process ids of the workers of a launcher."""
    try:
        return [int(pid) for pid in Path("/proc/%d/task/%d/children" % (launcher, launcher)).read_text().split()]
    except OSError:
        return []
