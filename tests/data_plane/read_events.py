"""Reads a folder of event files with TensorBoard's own reader and prints the contents as JSON.

A scalar is printed as the bits of its f32, and an image as its size and the CRC of its pixels. The reader is told not
to remove duplicate events, so every duplicate in the files is printed.
"""
import json
import struct
import sys
import zlib

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.util import tensor_util

EVERYTHING = {"scalars": 0, "tensors": 0}
PLUGINS = ("text", "histograms", "images", "hparams")


def bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def text(event):
    (only,) = event.tensor_proto.string_val
    return only.decode()


def histogram(event):
    return tensor_util.make_ndarray(event.tensor_proto).tolist()


def picture(event):
    width, height, png = tensor_util.make_ndarray(event.tensor_proto)
    pixels = decode(png)
    assert (int(width), int(height)) == (len(pixels[0]) // 3, len(pixels))
    return [int(width), int(height), zlib.crc32(b"".join(pixels))]


def decode(png):
    """Decodes a PNG file into rows of RGB bytes and checks the CRC of every chunk."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, place = [], 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place:place + 4])
        kind_and_data = png[place + 4:place + 8 + length]
        assert struct.unpack(">I", png[place + 8 + length:place + 12 + length])[0] == zlib.crc32(kind_and_data)
        chunks.append((kind_and_data[:4], kind_and_data[4:]))
        place += 12 + length
    assert [kind for kind, _ in chunks] == [b"IHDR", b"IDAT", b"IEND"]
    width, height, *form = struct.unpack(">IIBBBBB", chunks[0][1])
    assert form == [8, 2, 0, 0, 0]
    data, rows, above = zlib.decompress(chunks[1][1]), [], bytes(3 * width)
    assert len(data) == height * (1 + 3 * width)
    for start in range(0, len(data), 1 + 3 * width):
        kind, row = data[start], bytearray(data[start + 1:start + 1 + 3 * width])
        for index in range(len(row)):
            left = row[index - 3] if index >= 3 else 0
            row[index] = (row[index] + (0, left, above[index])[kind]) % 256
        above = bytes(row)
        rows.append(above)
    return rows


def hyperparameters(contents, steps):
    found = {"steps": steps}
    if hparams.EXPERIMENT_TAG in contents:
        experiment = hparams.parse_experiment_plugin_data(contents[hparams.EXPERIMENT_TAG])
        found["names"] = [info.name for info in experiment.hparam_infos]
        found["shown_first"] = [info.name for info in experiment.hparam_infos if info.differs]
        found["metrics"] = [info.name.tag for info in experiment.metric_infos]
    if hparams.SESSION_START_INFO_TAG in contents:
        start = hparams.parse_session_start_info_plugin_data(contents[hparams.SESSION_START_INFO_TAG])
        found["values"] = {name: getattr(value, value.WhichOneof("kind")) for name, value in start.hparams.items()}
    if hparams.SESSION_END_INFO_TAG in contents:
        found["status"] = hparams.parse_session_end_info_plugin_data(contents[hparams.SESSION_END_INFO_TAG]).status
    return found


def main():
    found = EventAccumulator(sys.argv[1], size_guidance=EVERYTHING, purge_orphaned_data=False).Reload()
    tags = found.Tags()

    def of_plugin(name):
        try:
            return found.PluginTagToContent(name)
        except KeyError:
            return {}

    def events(name, read):
        return {tag: [[event.step, read(event)] for event in found.Tensors(tag)] for tag in sorted(of_plugin(name))}

    steps = {tag: [event.step for event in found.Tensors(tag)] for tag in of_plugin("hparams")}
    print(json.dumps({
        "scalars": {tag: [[event.step, bits(event.value)] for event in found.Scalars(tag)] for tag in tags["scalars"]},
        "texts": events("text", text),
        "histograms": events("histograms", histogram),
        "images": events("images", picture),
        "hparams": hyperparameters(of_plugin("hparams"), steps),
        "other_tags": sorted(set(tags["tensors"]).difference(*(of_plugin(name) for name in PLUGINS)))
        + [tag for kind in ("images", "histograms", "distributions", "audio") for tag in tags[kind]],
    }))


if __name__ == "__main__":
    main()
