#!/usr/bin/env python3
"""Makes golden tensors of LocDiff in plain PyTorch: the loss, every gradient, and two sampling chains.

Run from the repository root:

    python3 -m venv VENV && VENV/bin/pip install torch==2.11.0 safetensors==0.8.0 numpy
    VENV/bin/python tests/golden/make_reference.py tests/golden/reference.safetensors

The reference is `docs/examples/locdiff_torch.py`, in float32 without dropout. Degree 4 gives layers of width 25, 12 and
6, so that halving a width must round. A narrow embedding keeps the file small. The file holds
  weight.NAME, grad.NAME         each parameter of the network, and its gradient
  x0, image, t, noise, basis     the mini-batch, and the harmonics of the anchors
  kl_weight, loss                the weight 4.58 * 4 pi / (DEGREE + 1)^2 of the KL term, and the loss
  alphas_bar, grid               the noise schedule, and the timesteps of a chain with STEPS steps
  predicted                      the network's output for the noised mini-batch
  chain.noise                    [STEPS, BATCH, 25]: the initial noise, then the noise that each step but the last adds
  chain.eta0, chain.eta1         [STEPS, BATCH, 25]: the code after each step of a chain with eta 0 and with eta 1
"""
import math
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs" / "examples"))
import locdiff_torch as locdiff  # noqa: E402 (the path above must come first)

DEGREE, BATCH, ANCHORS, IMAGE_WIDTH, STEPS = 4, 8, 64, 16, 5


def unit_vectors(count):
    return torch.nn.functional.normalize(torch.randn(count, 3), dim=1)


@torch.no_grad()
def chain(model, alphas_bar, image, noise, eta):
    grid = torch.linspace(locdiff.TIMESTEPS - 1, 0, STEPS).round().long()
    x, states = noise[0], []
    for step, t in enumerate(grid.tolist()):
        last = step + 1 == STEPS
        following = torch.tensor(1.0) if last else alphas_bar[grid[step + 1]]
        predicted = model(x, torch.full((BATCH,), t), image)
        x = locdiff.denoise(x, predicted, alphas_bar[t], following, noise[(step + 1) % STEPS], eta)
        states.append(x)
    return torch.stack(states), grid


def main(out):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = locdiff.CSUnet((DEGREE + 1) ** 2, IMAGE_WIDTH)
    alphas_bar = locdiff.alphas_bar()
    x0 = locdiff.spherical_harmonics(unit_vectors(BATCH), DEGREE)
    basis = locdiff.spherical_harmonics(unit_vectors(ANCHORS), DEGREE)
    image, noise = torch.randn(BATCH, IMAGE_WIDTH), torch.randn_like(x0)
    t = torch.randint(locdiff.TIMESTEPS, (BATCH,))
    t[0], t[1], t[2] = 0, locdiff.TIMESTEPS - 1, t[3]
    kl_weight = 4.58 * 4 * math.pi / (DEGREE + 1) ** 2
    predicted = model(locdiff.noised(x0, noise, alphas_bar[t][:, None]), t, image)
    loss = locdiff.loss(predicted, x0, basis, kl_weight)
    loss.backward()
    chain_noise = torch.randn(STEPS, *x0.shape)
    eta0, grid = chain(model, alphas_bar, image, chain_noise, 0.0)
    eta1, _ = chain(model, alphas_bar, image, chain_noise, 1.0)
    tensors = {
        "x0": x0, "image": image, "t": t, "noise": noise, "basis": basis, "kl_weight": torch.tensor(kl_weight), "loss": loss,
        "alphas_bar": alphas_bar, "grid": grid, "predicted": predicted,
        "chain.noise": chain_noise, "chain.eta0": eta0, "chain.eta1": eta1,
    }
    for name, parameter in model.named_parameters():
        tensors["weight." + name], tensors["grad." + name] = parameter, parameter.grad
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, out)
    print("loss %.6f, %d parameters" % (loss.item(), sum(parameter.numel() for parameter in model.parameters())))


if __name__ == "__main__":
    main(*sys.argv[1:])
