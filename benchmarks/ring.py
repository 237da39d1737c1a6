"""Attention over several GPUs beside its competitors and beside one GPU alone: correctness first, then speed and accuracy.

    torchrun --nproc-per-node 4 --max-restarts 3 benchmarks/ring.py --json ring.jsonl --ring-flash-attention ~/ring-flash-attention
    torchrun --nproc-per-node 4 benchmarks/ring.py --parts dense --cases 32/8-8192 --exchange auto all_gather
    python benchmarks/ring.py --list

dense     TFLOP/s per GPU: ours by exchange, torch's context_parallel, ring-flash-attention (--ring-flash-attention is the folder of your
          own clone; it runs on the kernels of --kernels in place of the package flash-attn), and as a share of the same kernel
          alone on one GPU, all GPUs at once: at n tokens, a rank's own, and at N/√W, which has as many pairs as a rank's share
dilated   T1/(W·TW): one GPU on all N = W·n tokens (the others wait) over W times the time of W GPUs
accuracy  relative errors against float64, of one GPU and of 2, 4, … ranks, and their ratio

A contender that is wrong against float64 is shown as wrong and has no speed. FLOPs: 4·pairs·H·D forward, 3.5 times that with the
backward. A time is the median of the slowest rank. With --json and --max-restarts, a contender that hangs or kills a process is named,
and the rest goes on. Without a GPU everything runs over gloo, for a try: see tests/scripts/test_ring_benchmark.py.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from _ring_bench import WRONG, Bench, BudgetSpent
from _ring_cases import SETTINGS, Problem
from _ring_competitors import alone
from _ring_world import Failed, World

PASSES = ("forward", "training")


def dense(bench: Bench, label: str, H: int, Hk: int, n: int, is_causal: bool) -> None:
    W, args = bench.world.size, bench.args
    problem = Problem(H, Hk, args.head_dim, W * n, is_causal)
    bench.compile(problem.of_length(args.check_tokens))
    able = []
    for entry in bench.entries():
        index = bench.right_form(entry, problem.of_length(W * args.check_tokens), W, "check")
        if index is not None:
            able.append((entry.name, bench.forms(entry, problem, W, "dense")[index]))
    kernels = list(dict.fromkeys(["auto", *(bench.alone_kernel(form.kernel) for _, form in able)]))
    kernels = [kernel for kernel in kernels if bench.check_alone(kernel, problem.of_length(W * args.check_tokens), "check")]
    # as many pairs as a rank's share of the whole
    equal = W * n / math.sqrt(W)
    lengths = {"n": n, "N/√W": round(equal) if equal < 256 else round(equal / 128) * 128}
    for which in args.passes:
        title = f"{label} {which}"
        rates: dict[tuple[str, str], float] = {}
        for kernel in kernels:
            for name, length in lengths.items():
                one = problem.of_length(length)
                record = bench.time(f"{title} | alone {kernel} {name}", alone(kernel, one), one, which, ranks=W, share=1)
                bench.row(title, f"alone at {name} ({kernel})", record)
                if "tflops" in record:
                    rates[kernel, name] = record["tflops"]
        for entry_name, form in able:
            record = bench.time(f"{title} | {entry_name}", form, problem, which, ranks=W, share=W)
            of = bench.alone_kernel(form.kernel)
            shares = {name: record["tflops"] / rates[of, name] for name in lengths if "tflops" in record and (of, name) in rates}
            bench.row(title, form.name, record, "".join(f" | {share:.3f} of alone at {name}" for name, share in shares.items()))


def dilated(bench: Bench, label: str, setting: str, n: int, is_causal: bool) -> None:
    W, args = bench.world.size, bench.args
    problem = SETTINGS[setting].problem(W * n, is_causal, args.segment_unit)
    small = SETTINGS[setting].small(W * args.check_tokens, is_causal)
    able = [(entry, bench.right_form(entry, small, W, f"check {setting}")) for entry in bench.entries(dilated=True)]
    bench.check_alone("auto", small, f"check {setting}")
    for which in args.passes:
        title = f"{label} {which}"
        whole = bench.time(f"{title} | alone", alone("auto", problem), problem, which, ranks=1, share=1)
        bench.row(title, "alone on all of N", whole)
        for entry, index in able:
            if index is None:
                continue
            form = bench.forms(entry, problem, W, "dilated")[index]
            record = bench.time(f"{title} | {entry.name}", form, problem, which, ranks=W, share=W)
            both = "seconds" in record and "seconds" in whole
            bench.row(title, form.name, record, f" | T1/(W·TW) {whole['seconds'] / W / record['seconds']:.3f}" if both else "")


def accuracy(bench: Bench, label: str, setting: str, is_causal: bool) -> None:
    N = bench.args.accuracy_tokens
    H, Hk = (int(x) for x in bench.args.accuracy_heads.split("/"))
    is_dense = setting == "dense"
    problem = Problem(H, Hk, bench.args.head_dim, N, is_causal) if is_dense else SETTINGS[setting].small(N, is_causal)
    single: dict[str, dict[str, float]] = {}
    for size, entry in [(size, entry) for size in bench.world.sizes for entry in bench.entries(dilated=not is_dense)]:
        forms = bench.forms(entry, problem, size, label)
        for kernel in dict.fromkeys(["auto", *(bench.alone_kernel(form.kernel) for form in forms)]):
            if kernel not in single:
                single[kernel] = bench.check_alone(kernel, problem, label)
        bench.right_form(entry, problem, size, label, single)


def make_cases(args: argparse.Namespace) -> list[tuple[str, Callable[[Bench], None]]]:
    """(label, function) of everything asked for; what matters most first, should the budget end."""
    cases: list[tuple[str, Callable[[Bench], None]]] = []
    masks = [(mask, mask == "causal") for mask in args.masks]
    for part in args.parts:
        if part == "dense":
            for heads, lengths in [(args.heads[0], args.tokens), *((heads, args.more_tokens) for heads in args.heads[1:])]:
                H, Hk = (int(x) for x in heads.split("/"))
                for n in lengths:
                    for mask, is_causal in masks:
                        label = f"dense-{heads}-{n}-{mask}"
                        cases.append((label, functools.partial(dense, label=label, H=H, Hk=Hk, n=n, is_causal=is_causal)))
        elif part == "dilated":
            for n in args.dilated_tokens:
                for setting in args.settings:
                    for mask, is_causal in masks:
                        label = f"dilated-{setting}-{n}-{mask}"
                        cases.append((label, functools.partial(dilated, label=label, setting=setting, n=n, is_causal=is_causal)))
        else:
            for setting in ("dense", *args.settings):
                for mask, is_causal in masks:
                    label = f"accuracy-{setting}"
                    cases.append((f"{label}-{mask}", functools.partial(accuracy, label=label, setting=setting, is_causal=is_causal)))
    return [case for case in cases if not args.cases or any(word in case[0] for word in args.cases)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = os.environ.get("OUT")
    parser.add_argument("--list", action="store_true", help="print the labels of the cases and stop")
    parser.add_argument("--parts", nargs="+", default=["dense", "dilated", "accuracy"], choices=["dense", "dilated", "accuracy"])
    parser.add_argument("--cases", nargs="+", default=[], help="only cases whose label holds one of these texts")
    parser.add_argument("--against", nargs="+", default=["ours", "torch", "rfa"], choices=["ours", "torch", "rfa"])
    parser.add_argument("--exchange", nargs="+", default=["auto", "all_gather", "ring", "all_to_all"])
    parser.add_argument("--dilated-exchange", nargs="+", default=["auto"])
    parser.add_argument("--backends", nargs="+", default=["auto"], help="kernels of ours")
    parser.add_argument("--kernels", nargs="+", default=["auto", "sdpa_cudnn", "sdpa_flash"], help="kernels behind ring-flash-attention")
    parser.add_argument("--graphs", action="store_true", help="time ours and the kernel alone as CUDA graphs")
    parser.add_argument("--ring-flash-attention", metavar="PATH")
    parser.add_argument("--masks", nargs="+", default=["causal", "full"], choices=["causal", "full"])
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES, help="training: forward + backward")
    parser.add_argument(
        "--heads", nargs="+", default=["32/8", "32/32"], help="query/kv; --tokens of the first, --more-tokens of the others"
    )
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=[str(dtype).removeprefix("torch.") for dtype in WRONG])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768, 16384, 4096], help="per GPU, n")
    parser.add_argument("--more-tokens", nargs="+", type=int, default=[16384, 4096])
    parser.add_argument("--check-tokens", type=int, default=1024, help="per GPU, before timing")
    parser.add_argument("--settings", nargs="+", default=["12x64", "geometric", "16x128"], choices=list(SETTINGS))
    parser.add_argument("--dilated-tokens", nargs="+", type=int, default=[131072, 32768, 262144], help="per GPU")
    parser.add_argument("--segment-unit", type=int, default=2048, help="shortest segment of the dilated settings")
    parser.add_argument("--accuracy-tokens", type=int, default=8192, help="whole sequence, N")
    parser.add_argument("--accuracy-heads", default="8/4")
    parser.add_argument("--quick", action="store_true", help="32/8 at 8192 and 32768, dilated at 131072, shorter measurements")
    parser.add_argument("--seconds", type=float, default=0.4, help="of one measurement, beside its warm-up")
    parser.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing more is started")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a collective that hangs ends the process")
    parser.add_argument("--json", type=Path, default=Path(out) / "ring.jsonl" if out else None)
    parser.add_argument("--commit", help="what the results are of, where there is no git")
    args = parser.parse_args()
    if args.quick:
        args.heads, args.tokens, args.dilated_tokens, args.seconds = args.heads[:1], [8192, 32768], [131072], min(args.seconds, 0.25)
    return args


def main() -> None:
    args = parse()
    cases = make_cases(args)
    if args.list:
        print("\n".join(label for label, _ in cases))
        return
    if not cases:
        raise SystemExit(f"--cases {' '.join(args.cases)} chooses nothing; --list prints all labels")
    world = World(args.timeout)
    bench = Bench(args, world)
    world.say(f"# {' '.join(f'{key} {value}' for key, value in bench.journal.facts.items())}; auto = {bench.auto}")
    try:
        for label, case in cases:
            try:
                case(bench)
            except Failed as failed:
                world.say(f"{label}: FAILED: {failed}")
    except BudgetSpent:
        world.say(f"# budget of {args.budget:g} s used up; {label} and what follows it is not or not wholly measured")
    world.say(f"# {time.time() - bench.journal.began:.0f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
