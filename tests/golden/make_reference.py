#!/usr/bin/env python3
"""Golden tensors of the PyTorch reference: its loss, every gradient, and two sampling chains.

Run from the repository root, with torch 2.11.0 and safetensors installed:

    python3 tests/golden/make_reference.py PATH/TO/pytorch_reference.py tests/golden/reference.safetensors

The reference is loaded as it is (float32, no autocast, dropout 0); only its image width is made smaller, so that the file
stays small. Degree 4 gives odd widths (25, 12, 6). The file holds
  weight.NAME, grad.NAME         parameters of the network and their gradients
  x0, image, t, noise, basis     the mini-batch and the harmonics of the anchors
  kl_weight, loss                4.58 * 4 pi / (L + 1)^2, and what loss_fn returns
  alphas_bar, grid               the noise schedule and the timesteps of a chain of STEPS
  predicted                      the network's output for the noised mini-batch
  chain.noise                    [STEPS, n, d]: the start, then what each step but the last adds
  chain.eta0, chain.eta1         [STEPS, n, d]: x after each step of the reference's update rule, s scaled by eta
"""
import importlib.util, math, sys
import torch, torch.nn.functional as F
from safetensors.torch import save_file

DEGREE, BATCH, ANCHORS, IMAGE_WIDTH, STEPS = 4, 8, 64, 16, 5


def load(path):
    spec = importlib.util.spec_from_file_location("pytorch_reference", path)
    module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)
    module.D_IMAGE = IMAGE_WIDTH
    return module


@torch.no_grad()
def chain(reference, model, ab, image, noise, eta):
    """The update rule of the reference's `sample`, with the noise given and s scaled by eta."""
    grid = torch.linspace(reference.T - 1, 0, STEPS).round().long().tolist(); x = noise[0]; states = []
    for k, t in enumerate(grid):
        a, an = ab[t], ab[grid[k + 1]] if k + 1 < len(grid) else ab.new_tensor(1.0)
        x0 = model(x, image, torch.full((len(x),), t))
        eps = (x - a.sqrt() * x0) / (1 - a).sqrt(); s = eta * ((1 - an) / (1 - a) * (1 - a / an)).clamp(min=0).sqrt()
        x = an.sqrt() * x0 + (1 - an - s * s).clamp(min=0).sqrt() * eps + s * noise[(k + 1) % STEPS]
        states.append(x)
    return torch.stack(states), torch.tensor(grid)


def main(reference_path, out_path):
    reference = load(reference_path); torch.manual_seed(0); torch.use_deterministic_algorithms(True)
    model = reference.CSUNet(DEGREE, 0.0); ab = reference.alphas_bar("cpu"); scale = math.sqrt(4 * math.pi)
    unit = lambda n: F.normalize(torch.randn(n, 3), dim=1)
    x0, basis = reference.spherical_harmonics(unit(BATCH), DEGREE), reference.spherical_harmonics(unit(ANCHORS), DEGREE)
    d = x0.shape[1]; image, noise = torch.randn(BATCH, IMAGE_WIDTH), torch.randn(BATCH, d)
    t = torch.randint(reference.T, (BATCH,)); t[0], t[1], t[2] = 0, reference.T - 1, t[3]
    kl_weight = 4.58 * 4 * math.pi / (DEGREE + 1) ** 2
    loss = reference.loss_fn(model, ab, x0, image, t, noise, basis, scale, kl_weight, False); loss.backward()
    a = ab[t][:, None]; predicted = model(a.sqrt() * x0 * scale + (1 - a).sqrt() * noise, image, t)
    chain_noise = torch.randn(STEPS, BATCH, d)
    eta0, grid = chain(reference, model, ab, image, chain_noise, 0.0); eta1, _ = chain(reference, model, ab, image, chain_noise, 1.0)
    tensors = {f"weight.{k}": v for k, v in model.named_parameters()} | {f"grad.{k}": v.grad for k, v in model.named_parameters()}
    tensors |= {"x0": x0, "image": image, "t": t, "noise": noise, "basis": basis, "kl_weight": torch.tensor(kl_weight), "loss": loss,
                "alphas_bar": ab, "grid": grid, "predicted": predicted, "chain.noise": chain_noise, "chain.eta0": eta0, "chain.eta1": eta1}
    save_file({k: v.detach().contiguous() for k, v in tensors.items()}, out_path)
    print(f"loss {loss.item():.6f}, {sum(v.numel() for v in model.parameters())} parameters")


if __name__ == "__main__":
    main(*sys.argv[1:])
