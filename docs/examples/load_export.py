#!/usr/bin/env python3
"""Loads a file written by `locdiff-launch checkpoint export` and predicts clean codes. Needs only numpy.

    python3 load_export.py EXPORT.safetensors CODES.npy TIMESTEPS.npy EMBEDDINGS.npy PREDICTED.npy

Inputs for a batch of b: noised codes [b, dimensions], timesteps [b] counted from 0, and image embeddings [b, width] as
stored in the shards (this script standardises them). The prediction is the clean code, in the scale used in training.
"""
import json
import struct
import sys

import numpy as np

TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8"}
TIME_WIDTH = 200


def read_safetensors(path):
    """Returns a dictionary of tensors and one of metadata.

    The file contains the length of the header (eight bytes), the header as JSON, and the data.
    """
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        numbers = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(numbers[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


class CsUnet:
    """Three C-Siren modules down and three up, with skip connections. All sizes follow from the weights."""

    def __init__(self, tensors):
        self.tensors = tensors

    def linear(self, name, x):
        return x @ self.tensors[name + ".weight"].T + self.tensors[name + ".bias"]

    def module(self, name, x, time, image):
        """sin(W_o h) with h = (1 + scale) * W_x x + shift + W_I e; scale and shift depend on the timestep."""
        hidden = self.linear(name + ".time.0", time)
        scale, shift = np.split(self.linear(name + ".time.2", hidden / (1 + np.exp(-hidden))), 2, axis=1)
        h = (1 + scale) * self.linear(name + ".x", x) + shift + self.linear(name + ".image", image)
        return np.sin(self.linear(name + ".out", h))

    def predict(self, codes, timesteps, embeddings):
        frequencies = np.exp(-np.log(10000.0) * np.arange(TIME_WIDTH // 2) / (TIME_WIDTH // 2))
        angles = timesteps[:, None] * frequencies
        time = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        image = (embeddings - self.tensors["image_mean"]) / self.tensors["image_std"]

        down1 = self.module("down1", codes, time, image)
        down2 = self.module("down2", down1, time, image)
        down3 = self.module("down3", down2, time, image)
        up3 = self.module("up3", down3, time, image)
        up2 = self.module("up2", np.concatenate([up3, down3], axis=1), time, image)
        up1 = self.module("up1", np.concatenate([up2, down2], axis=1), time, image)
        return self.linear("out", np.concatenate([up1, down1], axis=1))


def main():
    if len(sys.argv) != 6:
        sys.exit(__doc__)
    export, *inputs, target = sys.argv[1:]
    tensors, metadata = read_safetensors(export)
    config = json.loads(metadata["config"])
    print("degree %d, step %s, written by version %s" % (config["model"]["degree"], metadata["step"], metadata["version"]))
    np.save(target, CsUnet(tensors).predict(*(np.load(path) for path in inputs)))


if __name__ == "__main__":
    main()
