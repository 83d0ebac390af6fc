"""Reads the lock files. They have pip's requirements format. Each entry is one wheel, and a comment above it gives the sizes of the wheel.

    # bytes: download 530604548, unpacked 1034743808
    torch==2.11.0 --hash=sha256:7aa2f9bb...

Each set includes the sets before it: `link` adds to `cpu`, and `cuda` adds to `link`.
`python3 setup/locks.py WHEEL...` prints the lock entries of wheel files, to paste into a lock file after a change of version.
"""

import hashlib
import re
import sys
from typing import NamedTuple

SETS = ("cpu", "link", "cuda")

# Files to unpack: libraries, headers, licences and torch/version.py. The rest of torch's Python code is left out.
WANTED_MEMBER = re.compile(r"^(torch/lib/|torch/include/|torch/version\.py$|nvidia/)|\.dist-info/.*(licen[sc]e|notice|copying)", re.IGNORECASE)

ENTRY = re.compile(r"^# bytes: download (\d+), unpacked (\d+)\n([a-z0-9-]+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
BLOCK_BYTES = 4096


class Wheel(NamedTuple):
    """One pinned wheel."""

    lock: str
    name: str
    version: str
    sha256: str
    download_bytes: int
    unpacked_bytes: int


def load_set(folder, set_name, whole=True):
    """Returns the wheels of a set. With `whole=False`, returns only the wheels that the set adds to the previous set."""
    names = SETS[: SETS.index(set_name) + 1] if whole else (set_name,)
    return [wheel for name in names for wheel in load_lock(folder / (name + ".lock"))]


def load_lock(path):
    text = path.read_text()
    wheels = [
        Wheel(path.name, name, version, sha256, int(download), int(unpacked))
        for download, unpacked, name, version, sha256 in ENTRY.findall(text)
    ]
    # Count the entries, because `findall` silently skips an entry that the pattern does not match.
    if len(wheels) != sum("==" in line for line in text.splitlines() if not line.startswith("#")):
        raise OSError(0, "a lock entry has no `# bytes:` line or no hash", str(path))
    return wheels


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def entry(path):
    """Returns the lock entry of a wheel. The unpacked size is rounded up to whole disk blocks."""
    import zipfile

    name, version = path.name.split("-")[:2]
    members = [member for member in zipfile.ZipFile(path).infolist() if WANTED_MEMBER.search(member.filename)]
    unpacked = sum(-(-member.file_size // BLOCK_BYTES) * BLOCK_BYTES for member in members)
    return "# bytes: download %d, unpacked %d\n%s==%s --hash=sha256:%s" % (
        path.stat().st_size, unpacked, name.replace("_", "-").lower(), version, sha256_of(path))


if __name__ == "__main__":
    from pathlib import Path

    for argument in sys.argv[1:]:
        print(entry(Path(argument)))
