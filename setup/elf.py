"""Lists the shared libraries of a binary: `needed` reads their names, and `resolve` asks the loader which files it finds for them."""

import struct
import subprocess

PT_LOAD, PT_DYNAMIC = 1, 2
DT_NEEDED, DT_STRTAB = 1, 5


def needed(path):
    """Returns the names of the libraries that a 64-bit little-endian ELF file needs directly. Indirect dependencies are not included."""
    data = path.read_bytes()
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("%s is not a 64-bit little-endian ELF file" % path)
    headers_at, = struct.unpack_from("<Q", data, 32)
    header_bytes, header_count = struct.unpack_from("<HH", data, 54)
    loads, dynamic = [], None
    for index in range(header_count):
        kind, _, offset, address, _, size = struct.unpack_from("<IIQQQQ", data, headers_at + index * header_bytes)
        if kind == PT_LOAD:
            loads.append((address, offset, size))
        elif kind == PT_DYNAMIC:
            dynamic = (offset, size)
    if dynamic is None:
        return []
    entries = list(struct.iter_unpack("<QQ", data[dynamic[0] : dynamic[0] + dynamic[1] // 16 * 16]))
    table = next(value for tag, value in entries if tag == DT_STRTAB)
    strings = next(table - address + offset for address, offset, size in loads if address <= table < address + size)
    starts = [strings + value for tag, value in entries if tag == DT_NEEDED]
    return [data[start : data.index(b"\0", start)].decode() for start in starts]


def resolve(path):
    """Returns `(name, path)` for all direct and indirect libraries of a binary. The path is None if the loader does not find the library.

    The environment is empty except for PATH, so that no variable changes the search.
    """
    listing = subprocess.run(["ldd", str(path)], env={"PATH": "/usr/bin:/bin"}, stdout=subprocess.PIPE, universal_newlines=True, check=True)
    pairs = (line.strip().split(" => ") for line in listing.stdout.splitlines() if " => " in line)
    return [(name, None if place == "not found" else place.rpartition(" (")[0]) for name, place in pairs]
