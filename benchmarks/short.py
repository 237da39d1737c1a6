"""What one call costs as its caller, the GPU and its kernels see it: dilated and dense attention, every option, and competitors.

    python benchmarks/short.py --save short.jsonl                                  # planned for four minutes on an H200
    python benchmarks/short.py --torchscale ~/torchscale --million                 # with TorchScale, and 1,048,576 positions
    python benchmarks/short.py --cases "gigapath-*" longnet-16384-full-x8 --backends nested flash4 --graphs
    python benchmarks/short.py --device cpu                                        # a smoke run: small sizes, no figures to keep

Cases are FAMILY-LENGTH[-full][-xBATCH] or an option; bfloat16 but for option-float32. Each pass, forward without gradients and forward +
backward, is timed in four ways, in milliseconds:

called   a loop of calls without synchronising, over their number: what a training loop pays
single   CUDA events around one call that finds the queue empty, median
host     until such a call returns, median
kernels  device time of the kernels of one call and their number, by torch.profiler

ours        the defaults, backend "auto"; "ours NAME" is a backend of --backends
equal       ours as TorchScale's function: head_offsets="blocked", tail="zero_keys", mixture_grad="detached"
torchscale  its dilated attention from your own clone, on the kernel --kernel in place of the package flash-attn
sdpa_…, fa4  dense attention of torch and of FlashAttention-4, where it has no more than --most-pairs pairs
without     in the cases of options: the same call without the option

Wrong has no time: out, dq, dk and dv of each are first compared with float64, all rows of two heads up to 10,240 positions, 64 rows of
each beyond. At such lengths dk and dv of a key rest on out and lse of all its rows as our forward gives them.
FLASH3_LIBRARY (and FLASH3_CUDART) in the environment load FlashAttention-3's library for ours.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from _competitors import TorchScale, find_torchscale
from _short_cases import MILLION, Case, Contender, Settings, chosen, make_case
from _short_problem import Data, Problem
from _short_truth import SEED, Truth
from _timing import call_figures, captured, kernel_time, machine, save

from dilated_attention.backends.flash import flash3

# multiply-adds of a pair and channel, twice: two products forward, five more backward
FLOPS = {"forward": 4, "both": 14}
# what a contender may raise for what it cannot do
CANNOT = (RuntimeError, ImportError, AssertionError, ValueError, TypeError, AttributeError)
Record = dict[str, Any]


class Table:
    """Measures case by case, prints a line a contender as it ends, and keeps the records."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.records: dict[str, list[Record]] = {}

    def run(self, case: Case) -> None:
        self.records[case.name] = []
        # contenders of one function after one another, so that its tensors and its truth are made once
        for problem in dict.fromkeys(contender.problem for contender in case.contenders):
            truth: Truth | str
            try:
                truth = Truth(Data(problem, self.args.device))
            except RuntimeError as error:
                # out of memory; the other functions of this case may fit
                truth = _reason(error)
            for contender in case.contenders:
                if contender.problem == problem:
                    record: Record = {"case": case.name, "contender": contender.name} | _about(problem)
                    record |= {"cannot": f"no truth: {truth}"} if isinstance(truth, str) else self.measure(contender, truth)
                    self.records[case.name].append(record)
                    print(line(record), flush=True)
                    save(self.args.save, record | machine())
            del truth
            self.tidy()

    def tidy(self) -> None:
        gc.collect()
        if self.args.device == "cuda":
            torch.cuda.empty_cache()

    def measure(self, contender: Contender, truth: Truth) -> Record:
        """Errors and, where these are small, the figures of both passes; or why it cannot."""
        record: Record = {}
        data = truth.data
        try:
            with contender.context():
                function = contender.make(data)
                self.check(record, contender, truth, function)
                if "wrong" not in record:
                    for which, call in _passes(data, function).items():
                        record[which] = self.figures(call, contender.problem.pairs * contender.problem.head_dim * FLOPS[which])
        except CANNOT as error:
            # after an illegal access nothing else of this process can be believed
            if isinstance(error, getattr(torch, "AcceleratorError", ())):
                raise
            record["cannot"] = _reason(error)
        if "cannot" in record:
            self.tidy()
        return record

    def check(self, record: Record, contender: Contender, truth: Truth, function: Callable[..., torch.Tensor]) -> None:
        data = truth.data
        torch.manual_seed(SEED)
        out = function(*data.leaves)
        grads = torch.autograd.grad(out, data.leaves, data.dout)
        record["errors"] = truth.errors(out, grads, contender.until)
        notes = [truth.note] if truth.note else []
        if contender.until is not None:
            notes.append(f"compared to position {contender.until}: r does not divide w, and TorchScale shifts what follows")
        if notes:
            record["note"] = "; ".join(notes)
        if wrong := truth.wrong(record["errors"]):
            record["wrong"] = wrong

    def figures(self, call: Callable[[], Any], flops: float) -> dict[str, float]:
        args = self.args
        found = call_figures(call, args.device, seconds=args.seconds, kernels=not args.without_kernels)
        found["tflops"] = flops / found["called"] / 1e9
        if args.graphs and args.device == "cuda":
            # what reads a number back, as bounds of documents, cannot be captured
            with contextlib.suppress(RuntimeError):
                found["graph"] = call_figures(captured(call), args.device, seconds=args.seconds, kernels=False)["called"]
        return found


def _reason(error: Exception) -> str:
    """What an error says, its first three lines in one."""
    return f"{type(error).__name__}: {' '.join(part.strip() for part in str(error).splitlines()[:3])}"


def _passes(data: Data, function: Callable[..., torch.Tensor]) -> dict[str, Callable[[], Any]]:
    def forward() -> torch.Tensor:
        with torch.no_grad():
            return function(*data.leaves)

    return {"forward": forward, "both": lambda: torch.autograd.grad(function(*data.leaves), data.leaves, data.dout)}


def _about(problem: Problem) -> Record:
    found: Record = {"N": problem.length, "heads": problem.heads, "head_dim": problem.head_dim, "causal": problem.is_causal}
    found |= {"batch": problem.batch, "dtype": str(problem.dtype).removeprefix("torch."), "pairs": problem.pairs}
    return found | ({"queries": problem.queries} if problem.queries else {})


def line(record: Record) -> str:
    """Times of both passes, or why there are none."""
    text = f"{record['case']:<22} {record['contender']:<16}"
    errors = " ".join(f"{name} {error:.1e}" for name, error in record.get("errors", {}).items())
    if "cannot" in record:
        return f"{text} cannot: {record['cannot']}"
    note = f" – {record['note']}" if "note" in record else ""
    if "wrong" in record:
        return f"{text} wrong: {errors}{note}"
    for which in FLOPS:
        x = record[which]
        text += f" | {which} {x['called']:.3f} / {x['single']:.3f} / {x['host']:.3f}"
        text += f" / {x['kernels']:.3f} ms in {x['launches']:.0f}" if "kernels" in x else " ms"
        text += f", {x['tflops']:.0f} TFLOP/s" + (f", graph {x['graph']:.3f}" if "graph" in x else "")
    return f"{text} | {errors}{note}"


def summary(records: dict[str, list[Record]]) -> list[str]:
    """A Markdown table, a row a case: ours as called, host and kernels; the others' time as called over ours, forward and both."""
    rows = [
        "| case | ours, forward: called (host, kernels) ms | forward + backward | others ÷ ours, as called: forward, forward + backward |"
    ]
    rows.append("|---|---|---|---|")
    for name, found in records.items():
        first, *others = found
        cells = [_cell(first, which) for which in FLOPS]
        ratios = []
        for other in others:
            if missing := ("wrong" if "wrong" in other else "–" if "cannot" in other else ""):
                ratios.append(f"{other['contender']} {missing}")
            elif "both" in first and "both" in other:
                ratios.append(" ".join([other["contender"], *(f"{other[w]['called'] / first[w]['called']:.2f}" for w in FLOPS)]))
            else:
                ratios.append(f"{other['contender']} {' '.join(_cell(other, w) for w in FLOPS)}")
        rows.append(f"| {name} | {cells[0]} | {cells[1]} | {' · '.join(ratios)} |")
    return rows


def _cell(record: Record, which: str) -> str:
    if which not in record:
        return "wrong" if "wrong" in record else "–"
    x = record[which]
    kernels = f", {x['kernels']:.3f}" if "kernels" in x else ""
    return f"{x['called']:.3f} ({x['host']:.3f}{kernels})"


def launch_cost(device: str) -> float:
    """µs that torch needs to launch one small kernel, for the host times to be read by."""
    x = torch.zeros(64, device=device)
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(500):
            x.add_(1.0)
        end = time.perf_counter()
        if device == "cuda":
            torch.cuda.synchronize()
    return 1e6 * (end - start) / 500


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", metavar="NAME", help="names or wildcards; without it all but 1,048,576 positions")
    parser.add_argument("--million", action="store_true", help=f"also {', '.join(MILLION)}")
    parser.add_argument("--backends", nargs="+", default=[], metavar="NAME", help="ours by these backends too")
    parser.add_argument("--torchscale", metavar="PATH", help="folder of your clone of github.com/microsoft/torchscale")
    parser.add_argument("--kernel", help="backend that stands in for flash-attn in TorchScale: sdpa_flash, on a CPU sdpa_cpu")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each measurement; at least 20 calls where they take thrice that")
    parser.add_argument("--most-pairs", type=float, default=5e10, help="of dense competitors, all heads (5e10)")
    parser.add_argument("--graphs", action="store_true", help="also replay each pass from a CUDA graph")
    parser.add_argument("--without-kernels", action="store_true", help="never start the profiler")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a smoke run at a 64th of the lengths")
    parser.add_argument("--list", action="store_true", help="print the cases and who competes, measure nothing")
    parser.add_argument("--save", metavar="PATH", help="append JSON lines here")
    args = parser.parse_args(arguments)
    try:
        args.names = chosen(args.cases, args.million)
        args.folder = None if args.torchscale is None else find_torchscale(args.torchscale)
    except ValueError as problem:
        parser.error(str(problem))
    return args


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    kernel = args.kernel or ("sdpa_flash" if args.device == "cuda" else "sdpa_cpu")
    if os.environ.get("FLASH3_LIBRARY"):
        flash3.load_library(os.environ["FLASH3_LIBRARY"], os.environ.get("FLASH3_CUDART"))
    torchscale = None if args.folder is None else TorchScale(args.folder, kernel)
    divisor = 1 if args.device == "cuda" else 64
    settings = Settings(tuple(args.backends), torchscale, args.most_pairs, divisor)
    if args.list:
        for name in args.names:
            print(f"{name}: {', '.join(contender.name for contender in make_case(name, settings).contenders)}")
        return
    if args.device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU: benchmarks/cpu_speed.py is the CPU's; --device cpu is a smoke run of this one")
        # an error here is better than one an hour later
        torch.cuda.init()
    cost = f"a launch of torch's costs {launch_cost(args.device):.1f} µs"
    if not args.without_kernels:
        kernel_time(lambda: torch.zeros(8, device=args.device), args.device)
        # CUPTI stays loaded: host times are true where this is no more than before
        cost += f", {launch_cost(args.device):.1f} after the profiler first ran"
    print(f"{machine()}; {cost}", flush=True)
    print("called / single / host / kernels in ms, launches of one call; errors against float64", flush=True)
    table = Table(args)
    begun = time.perf_counter()
    for name in args.names:
        table.run(make_case(name, settings))
    print(f"\n{time.perf_counter() - begun:.0f} s in all\n")
    print("\n".join(summary(table.records)))


if __name__ == "__main__":
    main()
