"""Ours beside TorchScale's dilated attention, dense attention and FlexAttention: one run, one GPU, bf16, correctness first.

    python benchmarks/versus.py --list
    python benchmarks/versus.py --torchscale ~/torchscale --save versus.jsonl              # everything: ten minutes or so
    python benchmarks/versus.py --against dense flex --cases longnet --lengths 32768 --masks causal

TorchScale's sources are never part of this repository: --torchscale is the folder of your own clone. What is timed of it is the
attention alone (gathering, kernel, scattering; no projections), on the kernel named by --kernel in place of the package flash-attn.

ours    the defaults: exact gradient of the mixture, offsets h mod r, real keys only
equal   ours as the same function as TorchScale's: head_offsets="blocked", tail="zero_keys", mixture_grad="detached"

dense   flash4 and sdpa_cudnn, where this machine has them; flex adds compiled FlexAttention to them
flex-dilated  ours in FlexAttention: a BlockMask of the union of all branches, log m added to the scores; up to 32768 positions

Rows are checked against float64. Ratios are times of the competitor over ours; memory is the peak of forward and backward beyond
the inputs, gradients included. Nothing is extrapolated: what would take longer than --most seconds is left out.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from _cases import DENSE, Case, line, make_cases, ratios
from _competitors import TorchScale, detached_rows, find_torchscale, flex_dense, flex_dilated, shifted_from
from _timing import inputs, interleaved, machine, peak_extra, sampled_error, save

from dilated_attention import BackendUnavailable, DilatedPattern, attention, dilated_attention
from dilated_attention.engine.reference_rows import sampled_rows

Function = Callable[..., torch.Tensor]
EQUAL: dict[str, Any] = {"head_offsets": "blocked", "tail": "zero_keys", "mixture_grad": "detached"}
WRONG = 0.02
# dense attention of this many positions foretells whether the whole length is affordable
PROBE = 16384
# FlexAttention's masks look at every pair once
MOST_DILATED_FLEX = 32768


class Measurement:
    """The tensors and results of one case; each method adds to ``results``."""

    def __init__(self, case: Case, seconds: float) -> None:
        self.case = case
        self.seconds = seconds
        torch.manual_seed(case.length)
        q, k, v, self.dout = inputs(case.length, case.heads, case.head_dim, count=4)
        self.leaves = [x.requires_grad_() for x in (q, k, v)]
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, function: Function) -> torch.Tensor:
        with torch.no_grad():
            return function(*self.leaves)

    def train(self, function: Function) -> tuple[torch.Tensor, ...]:
        out = function(*self.leaves)
        return (out, *torch.autograd.grad(out, self.leaves, self.dout))

    def errors(self, name: str, errors: dict[str, float], note: str = "") -> None:
        """Print and keep errors; past WRONG the result is marked, not hidden."""
        result = self.results.setdefault(name, {})
        result["errors"] = errors
        if wrong := [key for key, value in errors.items() if not value < WRONG]:
            note = f"WRONG {' '.join(wrong)}; {note}"
            result["wrong"] = True
        if note:
            result["note"] = note
        shown = " ".join(f"{key} {value:.1e}" for key, value in errors.items())
        print(f"  {self.case.label} {name}: {shown}{' – ' if note else ''}{note}", flush=True)

    def time(self, functions: dict[str, Function], passes: tuple[str, ...] = ("forward", "training")) -> None:
        for which in passes:
            call = self.run if which == "forward" else self.train
            able: dict[str, Callable[[], Any]] = {}
            for name, function in functions.items():
                try:
                    # a result that a competitor has no memory for, or no kernel, is left out
                    peak = peak_extra(functools.partial(call, function))
                except (torch.OutOfMemoryError, BackendUnavailable) as error:
                    self.results.setdefault(name, {})[f"{which}_refused"] = str(error).split("\n")[0]
                    continue
                able[name] = functools.partial(call, function)
                self.results.setdefault(name, {})[f"{which}_peak"] = peak
            for name, (ms, spread) in (interleaved(able, warmup=1, seconds=self.seconds) if able else {}).items():
                self.results[name] |= {f"{which}_ms": ms, f"{which}_spread": spread}

    def dilated(self, backend: str, torchscale: TorchScale | None, with_equal: bool = True) -> None:
        """Ours, ours as TorchScale's function, and TorchScale."""
        case = self.case
        settings: dict[str, Any] = {"segment_lengths": case.lengths, "dilation_rates": case.rates, "is_causal": case.is_causal}
        ours = functools.partial(dilated_attention, **settings, backend=backend)
        out, lse = ours(*self.leaves, return_lse=True)
        grads = torch.autograd.grad(out, self.leaves, self.dout)
        with torch.no_grad():
            self.errors("ours", sampled_error(case.pattern, [*self.leaves, self.dout], [out, lse, *grads], is_causal=case.is_causal))
        del out, lse, grads
        functions: dict[str, Function] = {"ours": ours}
        if torchscale is not None:
            if with_equal:
                functions["equal"] = functools.partial(ours, **EQUAL)
            functions["torchscale"] = torchscale.attention(case.heads, case.head_dim, case.pattern, case.is_causal)
            self.compare(functions["torchscale"], functions.get("equal"))
        self.time(functions)

    def compare(self, torchscale: Function, equal: Function | None) -> None:
        """Both against float64 where they are one function, and TorchScale's distance from it elsewhere."""
        case = self.case
        pattern = DilatedPattern(case.lengths, case.rates, "blocked", tail="zero_keys")
        shifted = shifted_from(pattern, case.length)
        rows = sample(shifted or case.length, case.heads, max(case.rates))
        true = self.true_rows(pattern, rows)
        kept: tuple[torch.Tensor, ...] = ()
        if equal is not None:
            mine = self.train(equal)
            self.errors("equal", {name: error(result, rows, t) for name, result, t in zip(("out", "dq"), mine, true, strict=False)})
            # no more than is compared below: a million tokens leave TorchScale little room
            kept = mine[2:] if shifted is None else ()
            del mine
        try:
            theirs = self.train(torchscale)
        except torch.OutOfMemoryError:
            self.results["torchscale"] = {"note": "out of memory"}
            return
        errors = {name: error(result, rows, t) for name, result, t in zip(("out", "dq"), theirs, true, strict=False)}
        # sampled rows know no dk and dv of a detached mixture; where every row is right, ours stand in
        errors |= {name: distance(a, b) for name, a, b in zip(("dk", "dv"), theirs[2:], kept, strict=False)}
        note = "blocked offsets, attends its zero padding, no gradient through the mixture"
        if shifted is not None:
            late = [(shifted + p, h) for p, h in sample(case.length - shifted, case.heads, 1)]
            off = error(theirs[0], late, self.true_rows(pattern, late)[0])
            note += f"; right to position {shifted}, rows after it shifted (r does not divide w): out is {off:.2f} off there"
        self.errors("torchscale", errors, note)

    def true_rows(self, pattern: DilatedPattern, rows: list[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            return detached_rows(pattern, (self.dout, *self.leaves), rows, is_causal=self.case.is_causal)

    def dense(self, names: list[str], most: float) -> None:
        """Dense attention, as far as it is affordable: timed like the rest to 1 s, one single forward to ``most``."""
        case = self.case
        functions = {name: functools.partial(attention, is_causal=case.is_causal, backend=name) for name in names if name != "flex"}
        part = [x.detach()[:, :PROBE] for x in self.leaves]
        able: dict[str, Callable[[], Any]] = {}
        for name, function in functions.items():
            try:
                function(*part)
                able[name] = functools.partial(function, *part)
            except BackendUnavailable as unavailable:
                self.results[name] = {"note": str(unavailable).split("\n")[0]}
        if not able:
            return
        probed = {name: ms / 1000 for name, (ms, _) in interleaved(able, seconds=0.1, most=5).items()}
        scale = (case.length / part[0].shape[1]) ** 2
        expected = min(probed.values()) * scale
        if expected > most:
            self.results[min(probed, key=probed.__getitem__)] = {"note": f"dense would take about {expected:.0f} s, not measured"}
            return
        whole = DilatedPattern((case.length,), (1,), "zero")
        if expected > 1:
            name = min(probed, key=probed.__getitem__)
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = self.run(functions[name])
            stop.record()
            stop.synchronize()
            self.check(name, whole, out)
            self.results[name]["forward_ms"] = start.elapsed_time(stop)
            self.results[name]["single"] = True
            return
        chosen: dict[str, Function] = {name: functions[name] for name in able}
        if "flex" in names and expected < 0.5:
            chosen["flex"] = flex_dense(case.length, case.is_causal)
        for name, function in chosen.items():
            self.check(name, whole, self.run(function))
        self.time(chosen, ("forward", "training") if expected < 0.3 else ("forward",))

    def flex_dilated(self) -> None:
        case = self.case
        function = flex_dilated(case.pattern, case.heads, case.length, case.is_causal)
        self.check("flex-dilated", case.pattern, self.run(function))
        self.time({"flex-dilated": function})

    def check(self, name: str, pattern: DilatedPattern, out: torch.Tensor) -> None:
        rows = sample(self.case.length, self.case.heads, 1)
        with torch.no_grad():
            true, _ = sampled_rows(pattern, *self.leaves, rows, is_causal=self.case.is_causal)
        self.errors(name, {"out": error(out, rows, true)})


def sample(length: int, heads: int, rate: int, count: int = 24) -> list[tuple[int, int]]:
    """(position, head) places: the ends, random ones, and positions that the widest dilation takes in some head."""
    generator = torch.Generator().manual_seed(length)
    places = [0, length - 1, *torch.randint(length, (count,), generator=generator).tolist()]
    places += [p // rate * rate for p in places[:6]]
    return [(p, int(h)) for p, h in zip(places, torch.randint(heads, (len(places),), generator=generator), strict=True)]


def error(found: torch.Tensor, rows: list[tuple[int, int]], true: torch.Tensor) -> float:
    at = tuple(torch.tensor(x, device=found.device) for x in zip(*rows, strict=True))
    return float((found.detach()[0][at].double() - true).norm() / true.norm())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Relative distance of two large tensors, a stretch at a time."""
    difference = sum(float((x.float() - y.float()).square().sum()) for x, y in zip(a.split(2**17, 1), b.split(2**17, 1), strict=True))
    return (difference / sum(float(y.float().square().sum()) for y in b.split(2**17, 1))) ** 0.5


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchscale", metavar="PATH", help="folder of your clone of github.com/microsoft/torchscale")
    parser.add_argument(
        "--against", nargs="+", choices=["torchscale", "dense", "flex", "flex-dilated"], default=["torchscale", "dense", "flex"]
    )
    parser.add_argument("--cases", nargs="+", default=[""], help='beginnings of the cases, as "gigapath 10001"; --list shows them')
    parser.add_argument("--lengths", nargs="+", type=int, default=[32768, 131_072, 2**20], help="of LongNet's cases")
    parser.add_argument("--masks", nargs="+", choices=["full", "causal"], default=["full", "causal"])
    parser.add_argument("--backend", default="auto", help="ours")
    parser.add_argument("--without-equal", action="store_true", help="leave out ours as TorchScale's function")
    parser.add_argument("--kernel", default="sdpa_flash", help="backend that stands in for flash-attn in TorchScale")
    parser.add_argument("--seconds", type=float, default=0.6, help="timing of one group of competitors")
    parser.add_argument("--most", type=float, default=20.0, help="longest single dense forward, in seconds")
    parser.add_argument("--list", action="store_true", help="print the cases and their goals, measure nothing")
    parser.add_argument("--save", metavar="PATH", help="append JSON lines here")
    args = parser.parse_args(arguments)
    args.chosen = [case for case in make_cases(args.lengths) if case.label.startswith(tuple(args.cases)) and case.mask in args.masks]
    if not args.chosen:
        parser.error(f"--cases {' '.join(args.cases)} with --masks {' '.join(args.masks)} chooses nothing; --list shows all")
    if "torchscale" in args.against and not args.list:
        try:
            args.folder = find_torchscale(args.torchscale)
        except ValueError as problem:
            parser.error(str(problem))
    return args


def main() -> None:
    args = parse()
    if args.list:
        for case in args.chosen:
            print(f"{case.label:<29} {case.heads}x{case.head_dim} w {case.lengths} r {case.rates} goals {case.goals}")
        return
    if not torch.cuda.is_available():
        sys.exit("no CUDA GPU: this benchmark compares GPU kernels")
    torchscale = None
    if "torchscale" in args.against:
        torchscale = TorchScale(args.folder, args.kernel)
        print(f"TorchScale runs on {args.kernel} in place of flash-attn (sdpa_flash: FlashAttention-2 as torch bundles it)")
    print("times are forward / forward + backward; ! is short of its goal")
    for case in args.chosen:
        measurement = Measurement(case, args.seconds)
        measurement.dilated(args.backend, torchscale, not args.without_equal)
        if {"dense", "flex"} & set(args.against):
            measurement.dense([name for name in DENSE if name != "flex" or "flex" in args.against], args.most)
        if "flex-dilated" in args.against and case.length <= MOST_DILATED_FLEX:
            measurement.flex_dilated()
        results = measurement.results
        print(line(case, results), flush=True)
        about = {"case": case.name, "N": case.length, "mask": case.mask, "heads": case.heads, "head_dim": case.head_dim}
        about |= {"backend": args.backend, "kernel": args.kernel, "pairs": case.pairs, "dense_pairs": case.dense_pairs, "goals": case.goals}
        save(args.save, about | {"results": results, "ratios": ratios(case, results)} | machine())
        del measurement
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
