#!/usr/bin/env python3
"""Makes golden gradients of GeoCLIP's contrastive loss in plain PyTorch, in float64.

Run from the repository root:

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 safetensors==0.8.0 numpy
    VENV/bin/python tests/golden/make_geoclip_head.py tests/golden/geoclip_head.safetensors

The embeddings of places are those that the package `geoclip` computed (`geoclip.safetensors`). The photos of the batch
were taken at the six places of `probe_latlon`, and at places 3 to 12 of `gallery_latlon`. The gallery consists of the 24
places of `gallery_latlon`. NEGATIVES of its points are drawn as `core/src/random/philox.rs` specifies, for step STEP of
seed SEED. The function `wave` gives the weights, the photos and their standardisation. The file holds
  loss                           the mean loss of the batch
  grad.NAME                      the gradient of each bias, and of logit_scale
  left.NAME, right.NAME          the gradient of each weight matrix, multiplied by a vector from the left or the right
  encoded                        the head's output for the first four photos, L2-normalised
"""
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SEED, STEP, NEGATIVES = 7, 3, 20
STREAM = 11 << 10


def wave(rows, columns, phase):
    """A matrix of full rank. This script and the tests of the program compute it from the same formula."""
    i, j = torch.arange(rows, dtype=torch.float64)[:, None], torch.arange(columns, dtype=torch.float64)
    return torch.sin(0.37 * i + 0.11 * j + 0.013 * i * j + phase)


def philox(counter, key):
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""
    low = 0xFFFFFFFF
    for _ in range(10):
        products = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [products[1] >> 32 ^ counter[1] ^ key[0], products[1] & low,
                   products[0] >> 32 ^ counter[3] ^ key[1], products[0] & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def negatives(points):
    blocks = (philox([block, 0, STEP, STREAM << 16], [SEED, 0]) for block in range(-(-NEGATIVES // 4)))
    return [word * points >> 32 for block in blocks for word in block][:NEGATIVES]


def main(path):
    places = load_file(Path(__file__).with_name("geoclip.safetensors"))
    probe, gallery = (torch.nn.functional.normalize(places[name].double()) for name in ("probe_out", "gallery_out"))
    truths = torch.cat([probe, gallery[3:13]])
    candidates = torch.cat([truths, gallery[negatives(len(gallery))]])
    image = wave(len(truths), 768, 1).half().double()
    mean, deviation = 0.1 * wave(1, 768, 2)[0], 1 + 0.5 * wave(1, 768, 3)[0]

    # The program keeps its weights in float32.
    weights = {
        "image.0.weight": 0.05 * wave(768, 768, 4), "image.0.bias": 0.05 * wave(1, 768, 5)[0],
        "image.2.weight": 0.05 * wave(512, 768, 6), "image.2.bias": 0.05 * wave(1, 512, 7)[0],
        "logit_scale": torch.tensor(2.0),
    }
    weights = {name: weight.float().double().requires_grad_() for name, weight in weights.items()}
    hidden = ((image - mean) / deviation @ weights["image.0.weight"].T + weights["image.0.bias"]).relu()
    output = torch.nn.functional.normalize(hidden @ weights["image.2.weight"].T + weights["image.2.bias"])
    logits = weights["logit_scale"].exp() * output @ candidates.T
    loss = torch.nn.functional.cross_entropy(logits, torch.arange(len(truths)))
    loss.backward()

    tensors = {"loss": loss.detach(), "encoded": output[:4].detach()}
    for name, weight in weights.items():
        if weight.dim() < 2:
            tensors["grad." + name] = weight.grad
        else:
            rows, columns = weight.shape
            tensors["left." + name] = wave(1, rows, 9)[0] @ weight.grad
            tensors["right." + name] = weight.grad @ wave(1, columns, 10)[0]
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, path)


if __name__ == "__main__":
    main(*sys.argv[1:])
