#!/usr/bin/env python3
"""LocDiff in plain PyTorch: harmonics, network, noise schedule, loss and one step of the sampler.

The Rust implementation is tested against this code (`tests/golden/make_reference.py`). The code also loads files that
`locdiff-launch checkpoint export` writes:

    model, config = load_export("model.safetensors")
    predicted = model(codes, timesteps, model.standardise(embeddings))

Needs torch; `load_export` needs safetensors too. Codes are in the scale of the network: harmonics times `CODE_SCALE`.
"""
# Letters at the end of tensor names: b batch, n points, a anchors, d = (L + 1)^2 dimensions of a code.
import json
import math

import torch
from torch import nn
from torch.nn import functional

TIMESTEPS = 200
TIME_WIDTH = 200
IMAGE_WIDTH = 768
CODE_SCALE = math.sqrt(4 * math.pi)


def spherical_harmonics(points_n3, degree):
    """Orthonormal real harmonics [n, d] of unit vectors; column l * l + l + m.

    The recursion runs over l for each m, in float64. It is stable at any degree, and the poles are not special.
    """
    x, y, z = points_n3.double().unbind(1)
    harmonics = torch.empty(len(x), (degree + 1) ** 2, device=x.device)
    cos_m, sin_m = torch.ones_like(x), torch.zeros_like(x)
    first = math.sqrt(1 / (4 * math.pi))
    for m in range(degree + 1):
        if m > 0:
            cos_m, sin_m = cos_m * x - sin_m * y, sin_m * x + cos_m * y
            first *= math.sqrt((2 * m + 1) / (2 * m))
        before, legendre = torch.zeros_like(z), torch.full_like(z, first)
        for l in range(m, degree + 1):
            if l > m:
                up = math.sqrt((4 * l * l - 1) / (l * l - m * m))
                down = math.sqrt(((l - 1) ** 2 - m * m) / (4 * (l - 1) ** 2 - 1)) if l > m + 1 else 0.0
                before, legendre = legendre, up * (z * legendre - down * before)
            middle = l * l + l
            if m == 0:
                harmonics[:, middle] = legendre.float()
            else:
                harmonics[:, middle + m] = (math.sqrt(2) * legendre * cos_m).float()
                harmonics[:, middle - m] = (math.sqrt(2) * legendre * sin_m).float()
    return harmonics


class CSiren(nn.Module):
    """sin(W_o h) with h = (1 + scale) * W_x x + shift + W_I e; scale and shift come from the timestep."""

    def __init__(self, inputs, outputs, image_width, bottleneck=0):
        super().__init__()
        hidden = bottleneck or outputs
        self.x = nn.Linear(inputs, hidden)
        self.image = nn.Linear(image_width, hidden)
        self.out = nn.Linear(hidden, outputs)
        self.time = nn.Sequential(nn.Linear(TIME_WIDTH, hidden), nn.SiLU(), nn.Linear(hidden, 2 * hidden))

    def forward(self, x, time, image, dropout):
        scale, shift = self.time(time).chunk(2, 1)
        hidden = (1 + scale) * self.x(x) + shift + self.image(image)
        return functional.dropout(torch.sin(self.out(hidden)), dropout, self.training)


class CSUnet(nn.Module):
    """A U-Net of three modules down and three up, with skip connections and a linear head. Predicts the clean code."""

    def __init__(self, dimensions, image_width=IMAGE_WIDTH, dropout=0.0, bottleneck=0):
        super().__init__()
        wide, middle, narrow = dimensions, dimensions // 2, dimensions // 4
        self.dropout = dropout
        self.down1 = CSiren(dimensions, wide, image_width, bottleneck)
        self.down2 = CSiren(wide, middle, image_width, bottleneck)
        self.down3 = CSiren(middle, narrow, image_width, bottleneck)
        self.up3 = CSiren(narrow, narrow, image_width, bottleneck)
        self.up2 = CSiren(2 * narrow, middle, image_width, bottleneck)
        self.up1 = CSiren(2 * middle, wide, image_width, bottleneck)
        self.out = nn.Linear(2 * wide, dimensions)
        self.register_buffer("image_mean", torch.zeros(image_width), persistent=False)
        self.register_buffer("image_std", torch.ones(image_width), persistent=False)

    def standardise(self, embeddings):
        """Converts embeddings as stored in the shards to the standardised embeddings that the network takes."""
        return (embeddings - self.image_mean) / self.image_std

    def forward(self, codes_bd, timesteps_b, image):
        half = TIME_WIDTH // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=codes_bd.device) / half)
        angles = timesteps_b[:, None].float() * frequencies
        time = torch.cat([angles.sin(), angles.cos()], 1)
        down1 = self.down1(codes_bd, time, image, self.dropout)
        down2 = self.down2(down1, time, image, self.dropout)
        down3 = self.down3(down2, time, image, self.dropout)
        up3 = self.up3(down3, time, image, self.dropout)
        up2 = self.up2(torch.cat([up3, down3], 1), time, image, self.dropout)
        up1 = self.up1(torch.cat([up2, down2], 1), time, image, self.dropout)
        return self.out(torch.cat([up1, down1], 1))


def alphas_bar():
    """Returns the share of signal at each timestep, by the cosine schedule of Nichol and Dhariwal."""
    fraction = torch.linspace(0, TIMESTEPS, TIMESTEPS + 1, dtype=torch.float64) / TIMESTEPS
    curve = torch.cos((fraction + 0.008) / 1.008 * math.pi / 2) ** 2
    curve = curve / curve[0]
    betas = (1 - curve[1:] / curve[:-1]).clamp(max=0.999)
    return torch.cumprod(1 - betas, 0).float()


def noised(harmonics_bd, noise_bd, alpha_bar):
    """Returns noised codes. This is the forward process of DDPM, equation 4."""
    return alpha_bar.sqrt() * harmonics_bd * CODE_SCALE + (1 - alpha_bar).sqrt() * noise_bd


def loss(predicted_bd, harmonics_bd, basis_ad, kl_weight):
    """Returns `kl_weight` times KL(prediction || truth) over the anchors, plus the mean squared error of the codes."""
    plain_bd = predicted_bd / CODE_SCALE
    log_q = functional.log_softmax(plain_bd @ basis_ad.T, 1)
    log_p = functional.log_softmax(harmonics_bd @ basis_ad.T, 1)
    divergence = (log_q.exp() * (log_q - log_p)).sum(1).mean()
    return divergence * kl_weight + functional.mse_loss(plain_bd * CODE_SCALE, harmonics_bd * CODE_SCALE)


def denoise(x, predicted, alpha_bar, alpha_bar_next, noise, eta):
    """One step of the sampler (DDIM, equations 12 and 16): deterministic for `eta` 0, DDPM's posterior for `eta` 1."""
    epsilon = (x - alpha_bar.sqrt() * predicted) / (1 - alpha_bar).sqrt()
    ratio = (1 - alpha_bar_next) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_next)
    sigma = eta * ratio.clamp(min=0).sqrt()
    direction = (1 - alpha_bar_next - sigma * sigma).clamp(min=0).sqrt()
    return alpha_bar_next.sqrt() * predicted + direction * epsilon + sigma * noise


def load_export(path):
    """Returns the network of an exported file, in evaluation mode, and the configuration of its training."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        config = json.loads(file.metadata()["config"])
    hidden, image_width = tensors["down1.image.weight"].shape
    dimensions = len(tensors["out.bias"])
    model = CSUnet(dimensions, image_width, bottleneck=0 if hidden == dimensions else hidden)
    for name in ("image_mean", "image_std"):
        setattr(model, name, tensors.pop(name))
    weights = {name: tensors[name] for name, _ in model.named_parameters()}
    model.load_state_dict(weights)
    return model.eval(), config
