#!/usr/bin/env python3
"""Makes golden outputs of GeoCLIP with the code and weights of the PyPI package `geoclip` 1.3.0.

Run from the repository root:

    python3 -m venv VENV && VENV/bin/pip install geoclip==1.3.0 torch==2.11.0 safetensors==0.8.0
    VENV/bin/python tests/golden/make_geoclip.py tests/golden/geoclip.safetensors

The script reads the inputs from the existing file, keeps them, and computes the outputs again in float32 on the CPU.
Different processors may give different last bits. The file holds
  probe_latlon, probe_out        six places (New York, Los Angeles, latitude 0 and longitude 0, the north pole, Sydney,
                                 London), and the location encoder's output for them
  gallery_latlon, gallery_out    the first 24 places of the package's gallery, and the location encoder's output
                                 for them
  image_in, image_out            six random CLIP features, and the output of the image encoder's MLP for them
  logit_scale                    the logarithm of the factor by which logits are multiplied
"""
import sys
from pathlib import Path

import geoclip
import torch
from geoclip.model.image_encoder import ImageEncoder
from geoclip.model.location_encoder import LocationEncoder
from safetensors.torch import load_file, save_file

WEIGHTS = Path(geoclip.__file__).parent / "model" / "weights"


def image_mlp():
    """The trained MLP of the image encoder. The encoder's constructor is not called, because it would download CLIP."""
    encoder = ImageEncoder.__new__(ImageEncoder)
    torch.nn.Module.__init__(encoder)
    encoder.mlp = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.ReLU(), torch.nn.Linear(768, 512))
    encoder.mlp.load_state_dict(torch.load(WEIGHTS / "image_encoder_mlp_weights.pth", weights_only=True))
    return encoder.mlp


@torch.no_grad()
def main(path):
    tensors = load_file(path)
    locations = LocationEncoder(from_pretrained=True).eval()
    for name in ("probe", "gallery"):
        tensors[name + "_out"] = locations(tensors[name + "_latlon"])
    tensors["image_out"] = image_mlp()(tensors["image_in"])
    scale = torch.load(WEIGHTS / "logit_scale_weights.pth", weights_only=True)
    tensors["logit_scale"] = scale.detach().reshape(1).float()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
