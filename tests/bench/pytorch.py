#!/usr/bin/env python3
"""The speed of LocDiff in PyTorch: training steps and sampling, as a PyTorch user would write them.

    python3 tests/bench/pytorch.py train --mode whole --degree 47 --batch 512
    python3 tests/bench/pytorch.py sample --mode whole --degree 47 --samples 16 --steps 20 --images 512
    python3 tests/bench/pytorch.py train --device cpu --threads 2 --precision f32 --degree 15 --anchors 512

Modes:
  eager            plain PyTorch
  compile          torch.compile with its default settings
  reduce-overhead  torch.compile(mode="reduce-overhead"), which uses CUDA graphs
  whole            the strongest that a user can write: one CUDA graph. Training: the compiled loss, the backward pass,
                   the clipping of the gradient and a capturable AdamW. Sampling: bf16 weights, all steps and the
                   decoding of the samples.

The network and the loss are those of `docs/examples/locdiff_torch.py`, by default with bf16 matrix products. The rows,
their codes and the anchors' harmonics are random and already on the device. There is no moving average of the weights.
The last line of the output is one JSON object. Needs only torch.
"""
# Letters at the end of tensor names: b batch, n chains, a anchors, d dimensions of a code.
import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import locdiff_torch as locdiff  # noqa: E402 (the path above must come first)

MODES = ("eager", "compile", "reduce-overhead", "whole")
WARM_UP = 20
POOL = 65536


def unit_vectors(count, device):
    return functional.normalize(torch.randn(count, 3, device=device), dim=1)


def wait(device):
    if device == "cuda":
        torch.cuda.synchronize()


def compiled(function, mode):
    if mode == "eager":
        return function
    return torch.compile(function, mode={"compile": "default", "whole": "default"}.get(mode, mode))


def captured(work, warm_up):
    """Runs `work` a few times and then records it as a CUDA graph. Returns a function that replays the graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(warm_up):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class Training:
    """One training step on random rows."""

    def __init__(self, options, device):
        self.options, self.device = options, device
        dimensions = (options.degree + 1) ** 2
        self.model = locdiff.CSUnet(dimensions, dropout=options.dropout).to(device)
        whole = options.mode == "whole"
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), 1e-4, betas=(0.9, 0.99), weight_decay=5e-4, fused=True, capturable=whole
        )
        self.alphas_bar = locdiff.alphas_bar().to(device)
        self.codes = locdiff.spherical_harmonics(unit_vectors(POOL, device), options.degree)
        self.bases = locdiff.spherical_harmonics(unit_vectors(POOL, device), options.degree)
        self.images = torch.randn(POOL, locdiff.IMAGE_WIDTH, device=device)
        self.loss = compiled(self.loss_of, options.mode)

    def loss_of(self, codes_bd, image, timesteps_b, noise_bd, basis_ad):
        noised_bd = locdiff.noised(codes_bd, noise_bd, self.alphas_bar[timesteps_b][:, None])
        with torch.autocast(self.device, torch.bfloat16, enabled=self.options.precision == "bf16"):
            predicted_bd = self.model(noised_bd, timesteps_b, image).float()
            plain_bd = predicted_bd / locdiff.CODE_SCALE
            logits_q, logits_p = plain_bd @ basis_ad.T, codes_bd @ basis_ad.T
        log_q, log_p = functional.log_softmax(logits_q.float(), 1), functional.log_softmax(logits_p.float(), 1)
        divergence = (log_q.exp() * (log_q - log_p)).sum(1).mean()
        squared = functional.mse_loss(predicted_bd, codes_bd * locdiff.CODE_SCALE)
        return 5.76 / codes_bd.shape[1] * divergence + squared

    def inputs(self):
        batch, pick = self.options.batch, lambda count: torch.randint(POOL, (count,), device=self.device)
        rows = pick(batch)
        timesteps_b = torch.randint(locdiff.TIMESTEPS, (batch,), device=self.device)
        noise_bd = torch.randn(batch, self.codes.shape[1], device=self.device)
        return self.codes[rows], self.images[rows], timesteps_b, noise_bd, self.bases[pick(self.options.anchors)]

    def update(self, inputs):
        loss = self.loss(*inputs)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=self.options.mode != "whole")
        return loss

    def step(self):
        if self.options.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        return self.update(self.inputs())

    def stepper(self):
        """Returns a function that makes one step."""
        return captured(self.step, WARM_UP) if self.options.mode == "whole" else self.step


def train(options, device):
    training = Training(options, device)
    step = training.stepper()
    for _ in range(WARM_UP):
        step()
    wait(device)
    times_ms = []
    # Several steps are timed together, so that the host does not wait for the device after each of them.
    for _ in range(max(1, options.iterations // 10)):
        begun = time.perf_counter()
        for _ in range(10):
            step()
        wait(device)
        times_ms.append((time.perf_counter() - begun) * 100)
    return {"batch": options.batch, "anchors": options.anchors, **spread("ms_per_step", times_ms)}


class Sampling:
    """Samples codes for a block of images, and decodes each sample to the best of many places."""

    def __init__(self, options, device):
        self.options, self.device = options, device
        dimensions = (options.degree + 1) ** 2
        self.model = locdiff.CSUnet(dimensions).to(device).eval()
        self.autocast = options.precision == "bf16"
        if options.mode == "whole":
            self.model = self.model.bfloat16()
        self.alphas_bar = locdiff.alphas_bar().to(device)
        self.grid = torch.linspace(locdiff.TIMESTEPS - 1, 0, options.steps).round().long().tolist()
        gallery = unit_vectors(options.gallery, device)
        self.gallery = torch.cat([locdiff.spherical_harmonics(part, options.degree).bfloat16() for part in gallery.split(8192)])
        self.chains = options.block * options.samples
        self.image = torch.randn(self.chains, locdiff.IMAGE_WIDTH, device=device)
        self.predict = compiled(self.model, options.mode)

    def predicted(self, x_nd, t):
        timesteps_n = torch.full((self.chains,), t, device=self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            return self.predict(x_nd, timesteps_n, self.image).float()

    def run(self):
        x_nd = torch.randn(self.chains, self.gallery.shape[1], device=self.device)
        one = torch.ones((), device=self.device)
        for index, t in enumerate(self.grid):
            following = self.alphas_bar[self.grid[index + 1]] if index + 1 < len(self.grid) else one
            if self.options.mode == "reduce-overhead":
                torch.compiler.cudagraph_mark_step_begin()
            predicted_nd = self.predicted(x_nd, t)
            x_nd = locdiff.denoise(x_nd, predicted_nd, self.alphas_bar[t], following, torch.randn_like(x_nd), 1.0)
        return torch.cat([(part.bfloat16() @ self.gallery.T).argmax(1) for part in x_nd.split(4096)])

    def runner(self):
        """Returns a function that samples and decodes one block of images."""
        return captured(self.run, 3) if self.options.mode == "whole" else self.run


@torch.no_grad()
def sample(options, device):
    run = Sampling(options, device).runner()
    run()
    wait(device)
    times_ms = []
    for _ in range(max(1, math.ceil(options.images / options.block))):
        begun = time.perf_counter()
        run()
        wait(device)
        times_ms.append((time.perf_counter() - begun) * 1e3 / options.block)
    return {"images": options.images, "samples": options.samples, "steps": options.steps, **spread("ms_per_image", times_ms)}


def spread(name, values):
    values.sort()
    at = lambda share: values[round(share * (len(values) - 1))]
    return {name: statistics.median(values), "ms_lo": at(0.1), "ms_hi": at(0.9)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("train", "sample"))
    parser.add_argument("--mode", default="eager", choices=MODES)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--precision", default="bf16", choices=("bf16", "f32"))
    parser.add_argument("--dropout", type=float, default=0.0)
    for name, value in (
        ("degree", 47), ("batch", 512), ("anchors", 2048), ("iterations", 200),
        ("images", 512), ("block", 256), ("samples", 16), ("steps", 20), ("gallery", 100_000), ("threads", 0),
    ):
        parser.add_argument("--" + name, type=int, default=value)
    options = parser.parse_args()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    result = {"train": train, "sample": sample}[options.what](options, device)
    peak_gib = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    about = {"what": options.what, "mode": options.mode, "degree": options.degree, "threads": torch.get_num_threads()}
    print(json.dumps({**about, "peak_gib": peak_gib, **result}))


if __name__ == "__main__":
    main()
