"""Reads a folder of event files with TensorBoard's own reader and prints what it found as JSON.

Scalars come as the bits of their f32. Nothing is purged: what is doubled in the files is doubled here.
"""
import json
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EVERYTHING = {"scalars": 0, "tensors": 0}


def bits(value):
    return struct.unpack("<I", struct.pack("<f", value))[0]


def text(event):
    (only,) = event.tensor_proto.string_val
    return only.decode()


def main():
    found = EventAccumulator(sys.argv[1], size_guidance=EVERYTHING, purge_orphaned_data=False).Reload()
    tags = found.Tags()
    print(json.dumps({
        "scalars": {tag: [[event.step, bits(event.value)] for event in found.Scalars(tag)] for tag in tags["scalars"]},
        "texts": {tag: [[event.step, text(event)] for event in found.Tensors(tag)] for tag in tags["tensors"]},
        "text_tags": sorted(found.PluginTagToContent("text")) if tags["tensors"] else [],
        "other_tags": sum(len(tags[kind]) for kind in ("images", "histograms", "distributions", "audio")),
    }))


if __name__ == "__main__":
    main()
