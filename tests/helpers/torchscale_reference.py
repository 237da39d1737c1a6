"""TorchScale's dilated models restated in float64: what its layers, Prov-GigaPath's slide encoder and LongViT compute, key by key.

Written from what those programs compute, zero keys, shifted segments and gradient-free mixture included; none of their code is here.
Weights are dicts under TorchScale's own names. `python -m benchmarks train-infer --tasks parity` holds the loaders against the real code.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """What TorchScale's configuration says of a model and its weights do not."""

    heads: int
    segments: tuple[int, ...]
    rates: tuple[int, ...]
    causal: bool = False
    xpos_base: float | None = None
    eps: float = 1e-5
    embed_scale: float = 1.0


def dilated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: Shape) -> torch.Tensor:
    """q, k, v (B, N, H, D) → (B, N, H, D). Each branch lays zeros behind the sequence and behind each segment, and attends to them."""
    B, N, H, D = q.shape
    zero_row = q.new_zeros(B, 1, H, D)
    padded = [torch.cat((x, zero_row), dim=1) for x in (q, k, v)]
    outs, lses = [], []
    for w, r in zip(shape.segments, shape.rates, strict=True):
        w = min(w, N)
        num_segments, stride = -(-N // w), -(-w // r) * r
        heads_per_offset = -(-H // r)
        out, lse = q.new_zeros(B, N, H, D), q.new_full((B, N, H), -1e8)
        for offset in range(r):
            heads = range(offset * heads_per_offset, min(H, (offset + 1) * heads_per_offset))
            if not heads:
                continue
            local = torch.arange(offset, stride, r)
            source = torch.arange(num_segments)[:, None] * w + local
            source = torch.where((local < w) & (source < N), source, N)
            # side by side with the padding still in: where r does not divide w, later segments land too far right
            target = torch.arange(num_segments)[:, None] * stride + local
            qs, ks, vs = (x[:, source][:, :, :, heads.start : heads.stop] for x in padded)
            scores = torch.einsum("bsihd,bsjhd->bsihj", qs, ks) / math.sqrt(D)
            if shape.causal:
                later = torch.ones(len(local), len(local), dtype=torch.bool).triu(1)
                scores = scores.masked_fill(later[:, None, :], -torch.inf)
            result = torch.einsum("bsihj,bsjhd->bsihd", scores.softmax(-1), vs)
            kept = target < N
            out[:, target[kept], heads.start : heads.stop] = result[:, kept]
            lse[:, target[kept], heads.start : heads.stop] = scores.logsumexp(-1)[:, kept].detach()
        outs.append(out)
        lses.append(lse)
    mixture = torch.stack(lses).softmax(0)
    return (mixture[..., None] * torch.stack(outs)).sum(0)


def is_shifted(shape: Shape, num_positions: int) -> bool:
    return any(w < num_positions and w % r for w, r in zip(shape.segments, shape.rates, strict=True))


def xpos(x: torch.Tensor, base: float, downscale: bool) -> torch.Tensor:
    """x (B, N, H, D) with neighbouring dimensions turned, and scaled by ζ^(n/base), n counted from the middle of the sequence."""
    N, D = x.shape[1], x.shape[3]
    position = torch.arange(N, dtype=x.dtype)
    zeta = (torch.arange(0, D, 2, dtype=x.dtype) + 0.4 * D) / (1.4 * D)
    scale = zeta ** ((position - (N + 1) // 2) / base)[:, None]
    if downscale:
        scale = 1 / scale
    angle = position[:, None] * 10000.0 ** (-torch.arange(D // 2, dtype=x.dtype) / (D // 2))
    cos, sin = (angle.cos() * scale)[:, None], (angle.sin() * scale)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def linear(weights: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def norm(weights: Weights, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm, or x itself where the weights have none of this name."""
    if f"{name}.weight" not in weights:
        return x
    return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], eps)


def attention(weights: Weights, prefix: str, x: torch.Tensor, shape: Shape) -> torch.Tensor:
    q, k, v = (linear(weights, f"{prefix}{name}_proj", x).unflatten(-1, (shape.heads, -1)) for name in "qkv")
    if shape.xpos_base is not None:
        q, k = xpos(q, shape.xpos_base, False), xpos(k, shape.xpos_base, True)
    out = dilated(q, k, v, shape).flatten(2)
    return linear(weights, f"{prefix}out_proj", norm(weights, f"{prefix}inner_attn_ln", out, shape.eps))


def layers(weights: Weights, prefix: str, x: torch.Tensor, shape: Shape) -> list[torch.Tensor]:
    """The input and what each pre-norm layer makes of it."""
    states = [x]
    while f"{prefix}layers.{len(states) - 1}.self_attn.q_proj.weight" in weights:
        layer = f"{prefix}layers.{len(states) - 1}."
        x = x + attention(weights, f"{layer}self_attn.", norm(weights, f"{layer}self_attn_layer_norm", x, shape.eps), shape)
        hidden = F.gelu(linear(weights, f"{layer}ffn.fc1", norm(weights, f"{layer}final_layer_norm", x, shape.eps)))
        x = x + linear(weights, f"{layer}ffn.fc2", norm(weights, f"{layer}ffn.ffn_layernorm", hidden, shape.eps))
        states.append(x)
    return states


def encoder(weights: Weights, x: torch.Tensor, shape: Shape, prefix: str = "") -> torch.Tensor:
    return norm(weights, f"{prefix}layer_norm", layers(weights, prefix, shape.embed_scale * x, shape)[-1], shape.eps)


def language_model(weights: Weights, tokens: torch.Tensor, shape: Shape) -> torch.Tensor:
    hidden = encoder(weights, weights["embed_tokens.weight"][tokens], shape)
    return hidden @ weights.get("output_projection.weight", weights["embed_tokens.weight"]).T


def grid_table(grid: int, dim: int) -> torch.Tensor:
    """Prov-GigaPath's position table (1 + grid², dim), row by row: the class token's zeros, then cell (x, y) in row 1 + x·grid + y."""
    omega = 1.0 / 10000.0 ** (torch.arange(dim // 4, dtype=torch.float64) / (dim / 4))
    rows = [torch.zeros(dim, dtype=torch.float64)]
    for x in range(grid):
        for y in range(grid):
            rows.append(torch.cat([f(p * omega) for p in (y, x) for f in (torch.sin, torch.cos)]))
    return torch.stack(rows)


def slide_encoder(
    weights: Weights, tiles: torch.Tensor, coords: torch.Tensor, shape: Shape, *, grid: int, tile_size: int = 256, global_pool: bool = False
) -> list[torch.Tensor]:
    """[result, then that of the input and of each layer without the encoder's last norm] of one batch of slides of equal length."""
    table = grid_table(grid, weights["cls_token"].shape[-1])
    cell = torch.floor(coords / tile_size).long()
    x = linear(weights, "patch_embed.proj", tiles) + table[1 + cell[..., 0] * grid + cell[..., 1]]
    x = torch.cat((weights["cls_token"].expand(len(x), -1, -1), x), dim=1)
    states = layers(weights, "encoder.", x, shape)
    states = [norm(weights, "encoder.layer_norm", states[-1], shape.eps), *states]
    return [norm(weights, "norm", s[:, 1:].mean(1) if global_pool else s[:, 0], 1e-6) for s in states]


def longvit(weights: Weights, image: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Patch tokens (B, N, E) of square images of the size that the positions were made for."""
    patch = weights["patch_embed.proj.weight"].shape[-1]
    tokens = F.conv2d(image, weights["patch_embed.proj.weight"], weights["patch_embed.proj.bias"], stride=patch)
    return encoder(weights, tokens.flatten(2).transpose(1, 2) + weights["pos_embed"], shape, "encoder.")


class Maker:
    """Random weights under TorchScale's names, float32, from one seed. Norms and biases are random too: a swapped pair shows."""

    def __init__(self, embed_dim: int, seed: int = 0) -> None:
        self.dim = embed_dim
        self.generator = torch.Generator().manual_seed(seed)
        self.weights: Weights = {}

    def tensor(self, name: str, *shape: int, std: float = 0.3, mean: float = 0.0) -> None:
        self.weights[name] = torch.randn(shape, generator=self.generator) * std + mean

    def linear(self, name: str, rows: int, columns: int) -> None:
        self.tensor(f"{name}.weight", rows, columns, std=columns**-0.5)
        self.tensor(f"{name}.bias", rows)

    def norm(self, name: str, dim: int | None = None) -> None:
        self.tensor(f"{name}.weight", dim or self.dim, mean=1.0)
        self.tensor(f"{name}.bias", dim or self.dim)

    def attention(self, prefix: str, *, subln: bool = True, head_dim: int | None = None) -> None:
        for name in ("k", "v", "q", "out"):
            self.linear(f"{prefix}{name}_proj", self.dim, self.dim)
        if subln:
            self.norm(f"{prefix}inner_attn_ln")
        if head_dim is not None:
            self.weights[f"{prefix}xpos.scale"] = (torch.arange(0, head_dim, 2) + 0.4 * head_dim) / (1.4 * head_dim)

    def layers(self, prefix: str, count: int, *, ffn: int, subln: bool = True, head_dim: int | None = None, last_norm: bool = True) -> None:
        for i in range(count):
            layer = f"{prefix}layers.{i}."
            self.attention(f"{layer}self_attn.", subln=subln, head_dim=head_dim)
            self.norm(f"{layer}self_attn_layer_norm")
            self.linear(f"{layer}ffn.fc1", ffn, self.dim)
            self.linear(f"{layer}ffn.fc2", self.dim, ffn)
            if subln:
                self.norm(f"{layer}ffn.ffn_layernorm", ffn)
            self.norm(f"{layer}final_layer_norm")
        if last_norm:
            self.norm(f"{prefix}layer_norm")

    def slide_encoder(self, in_dim: int, count: int, *, ffn: int) -> None:
        self.tensor("cls_token", 1, 1, self.dim)
        self.linear("patch_embed.proj", self.dim, in_dim)
        self.layers("encoder.", count, ffn=ffn)
        self.norm("norm")

    def longvit(self, patch: int, grid: int, count: int, *, ffn: int, prefix: str = "") -> None:
        self.tensor(f"{prefix}pos_embed", 1, grid * grid, self.dim)
        self.tensor(f"{prefix}patch_embed.proj.weight", self.dim, 3, patch, patch, std=0.1)
        self.tensor(f"{prefix}patch_embed.proj.bias", self.dim)
        self.layers(f"{prefix}encoder.", count, ffn=ffn, last_norm=False)


def double(weights: Weights) -> Weights:
    return {name: value.double() for name, value in weights.items()}
