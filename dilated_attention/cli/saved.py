"""``generate``, which continues a text with a saved model, and ``evaluate``: its bits per byte or per base on files."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import dataclasses
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dilated_attention import models
from dilated_attention.backends import BackendUnavailable, registry
from dilated_attention.cli.common import DTYPE_NAMES, add_command, count, put, put_json
from dilated_attention.models.saving import find_model
from dilated_attention.parsing import UsageError, size

# names of FASTA files, which may end in .gz in addition
_FASTA = (".fa", ".fasta", ".fna", ".ffn", ".frn")


def add(commands: Any) -> None:
    usage = "%(prog)s DIR (--prompt TEXT | --prompt-file FILE) [options]"
    text = "continue a text with a saved model of bytes or bases"
    generate = add_command(commands, "generate", _generate, has_json=False, usage=usage, help=text)
    text = "bits per byte or per base of a saved model on held-out data"
    evaluate = add_command(commands, "evaluate", _evaluate, usage="%(prog)s DIR --data PATH [options]", help=text)
    for add in (generate.add_argument, evaluate.add_argument):
        add("folder", type=Path, metavar="DIR", help="of save_pretrained, or of a run with checkpoint/ in it")
        add("--device", help="cpu, cuda or cuda:<index>; default: the GPU if there is one")
        add("--backend", default="auto", help="of the attention; default: auto")
        add("--dtype", choices=DTYPE_NAMES, help="default: bfloat16 on a GPU that supports it, else float32")
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, or bases: letters A, C, G, T, N")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file of it; for bases also FASTA with one record, plain or .gz")
    add = generate.add_argument
    add("--max-new-tokens", type=size, default=256, metavar="N", help="bytes or bases to add; default: 256")
    add("--temperature", type=float, default=1.0, help="of the softmax; 0 takes the likeliest; default: 1")
    add("--top-k", type=size, metavar="K", help="draw from the K likeliest only; default: from all")
    add("--top-p", type=float, metavar="P", help="draw from the fewest likeliest whose probabilities sum to P; default: 1")
    add("--seed", type=count, help="of the draws; default: another one each time")
    add("--stop", metavar="TEXT", help="end once this text has been printed")
    add = evaluate.add_argument
    text = "a file, or a folder of files; for bases FASTA with any number of records, plain or .gz"
    add("--data", type=Path, required=True, metavar="PATH", help=text)
    add("--context", type=size, metavar="N", help="positions of a window; default: the model's longest segment, else 8192")
    add("--stride", type=size, metavar="N", help="positions from window to window; default: half of the context")
    add("--windows", type=size, metavar="N", help="read only so many, evenly over the data; default: all")
    add("--by-position", action="store_true", help="also by how many positions a target could see, in powers of two")


def _device_of(name: str | None) -> torch.device:
    """Returns the device that ``--device`` names; None: the GPU if there is one. Raises UsageError if torch cannot use it here."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"--device is {name!r}, which torch cannot use here ({why}); expected cpu, cuda or cuda:<index>") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device is {name!r}; expected cpu, cuda or cuda:<index>")
    return device


@contextlib.contextmanager
def opened(args: argparse.Namespace, *, autocast: bool) -> Iterator[tuple[models.LongNetLM, models.Vocabulary, torch.device, torch.dtype]]:
    """Loads the model of the arguments and computes in their dtype. ``autocast``: in 16 bits cast where torch's autocast does, as in
    training; else cast the weights. Raises UsageError without such a backend or device; OSError, in one line, for errors of files, model
    and device."""
    registry.check_name(args.backend)
    device = _device_of(args.device)
    default = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    dtype: torch.dtype = getattr(torch, args.dtype or default)
    # a run's folder has the model's in it
    args.folder = find_model(args.folder)
    about = f"{args.folder} cannot be used: "
    try:
        model = models.LongNetLM.from_pretrained(args.folder, device=device, backend=args.backend)
        vocabulary = models.vocabulary_of(model.config)
        about = ""
        is_cast = autocast and dtype.itemsize == 2 and model.output_weight.dtype != dtype
        model.to(torch.float32 if is_cast else dtype)
        with torch.autocast(device.type, dtype) if is_cast else contextlib.nullcontext():
            yield model, vocabulary, device, dtype
    except UsageError:
        raise
    except (ValueError, RuntimeError, ImportError) as error:
        # while the model computes, another error of torch than of memory is a fault of ours
        if not (about or isinstance(error, (ValueError, torch.OutOfMemoryError, BackendUnavailable))):
            raise
        raise OSError(about + textwrap.shorten(str(error), 500, placeholder=" …")) from error


def _generate(args: argparse.Namespace) -> int:
    # arguments that are no UTF-8 are given back as the bytes that they were
    text: bytes = args.prompt.encode(errors="surrogateescape") if args.prompt_file is None else args.prompt_file.read_bytes()
    if not text:
        raise UsageError("the prompt is empty; expected at least one character to continue from")
    sampling = models.Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    with opened(args, autocast=False) as (model, vocabulary, device, _):
        generator = torch.Generator(device)
        # torch's own first seed is always the same
        generator.manual_seed(generator.seed() if args.seed is None else args.seed)
        sampling = dataclasses.replace(sampling, generator=generator)
        stop = b"" if args.stop is None else vocabulary.decode_bytes(vocabulary.encode(args.stop.encode(errors="surrogateescape")))
        if args.stop is not None and not stop:
            raise UsageError(f"--stop has no {vocabulary.unit}s; expected a text that ends the output, or leave it out")
        prompt = model.encode(_tokens(args, text, vocabulary))
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        written = b""
        for token in models.generate_stream(model, prompt, args.max_new_tokens, sampling=sampling):
            character = vocabulary.decode_bytes(token % len(vocabulary))
            print(decoder.decode(character), end="", flush=True)
            written = (written + character)[-max(1, len(stop)) :]
            if written == stop:
                break
        print(decoder.decode(b"", final=True), end="\n" if sys.stdout and sys.stdout.isatty() else "", flush=True)
    return 0


def _tokens(args: argparse.Namespace, text: bytes, vocabulary: models.Vocabulary) -> torch.Tensor:
    if vocabulary.unit == "base" and args.prompt_file is not None and text[:1] in (b">", b"\x1f"):
        records = models.read_fasta(args.prompt_file)
        if len(records) > 1:
            raise ValueError(f"--prompt-file {args.prompt_file} holds {len(records)} records; expected one, which is continued")
        return records[0][1]
    tokens = vocabulary.encode(text)
    if not len(tokens):
        raise ValueError(f"the prompt has no {vocabulary.unit}s; expected at least one to continue from")
    return tokens


def _evaluate(args: argparse.Namespace) -> int:
    if args.context is not None and args.stride is not None and args.stride > args.context:
        raise UsageError(f"--stride is {args.stride}; expected at most --context, {args.context}")
    files = _files(args.data)
    with opened(args, autocast=True) as (model, vocabulary, device, dtype):
        is_causal, unit = model.config.is_causal, vocabulary.unit
        if args.by_position and not is_causal:
            raise UsageError("--by-position is given, and this model sees both sides: each target can see all of its window; leave it out")
        if unit == "byte":
            records = [vocabulary.encode(file.read_bytes()) for file in files]
        else:
            if args.data.is_dir():
                files = [file for file in files if file.name.removesuffix(".gz").endswith(_FASTA)]
            if not files:
                known = ", ".join(_FASTA)
                raise OSError(
                    f"--data {args.data} holds no FASTA file, and the model's tokens are bases; expected names in {known}, also with .gz"
                )
            records = [bases for file in files for _, bases in models.read_fasta(file)]
        result = models.evaluate(model, records, context=args.context, stride=args.stride, num_windows=args.windows)
    answer: dict[str, Any] = {
        "checkpoint": str(args.folder), "parameters": model.num_parameters, "objective": "causal" if is_causal else "masked",
        "data": str(args.data), "files": len(files), "records": len(records), f"{unit}s": sum(map(len, records)), "scored": result.scored,
        f"bits_per_{unit}": result.bits, "context": result.context, "stride": result.stride, "windows": result.windows,
        f"{unit}s_per_second": result.positions / result.seconds, "seconds": result.seconds, "device": str(device),
        "dtype": str(dtype).removeprefix("torch."), "backend": args.backend,
    }  # fmt: skip
    if args.by_position:
        answer["by_position"] = [dataclasses.asdict(bucket) for bucket in result.by_position]
    if args.json:
        put_json(answer)
        return 0
    put(f"{args.folder}: {model.num_parameters:,} parameters, {answer['objective']}, {unit}s")
    put(f"{args.data}: {answer[f'{unit}s']:,} {unit}s, records: {len(records)}")
    put(
        f"windows of {result.context:,} {unit}s with a stride of {result.stride:,}: {result.windows:,} in {result.seconds:.1f} s, "
        f"{answer[f'{unit}s_per_second']:,.0f} {unit}s/s on {device} in {answer['dtype']}"
    )
    if args.by_position:
        # a window's positions, those that another window scores included
        put(f"{'positions seen':>20}  {'targets':>12}  bits per {unit}")
        for bucket in result.by_position:
            seen = f"{bucket.least:,}" if bucket.least == bucket.most else f"{bucket.least:,}–{bucket.most:,}"
            put(f"{seen:>20}  {bucket.targets:>12,}  {bucket.bits:.4f}")
    put(f"{result.bits:.4f} bits per {unit} over {result.scored:,}")
    return 0


def _files(path: Path) -> list[Path]:
    """Returns the files of the data in order of their names, hidden ones left out. Raises OSError if they hold nothing to score."""
    if not path.exists():
        raise FileNotFoundError(f"--data {path} does not exist; expected a file or a folder of files")
    names = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file()) if path.is_dir() else [Path()]
    files = [path / name for name in names if not any(part.startswith(".") for part in name.parts)]
    if not any(file.stat().st_size >= 2 or not file.is_file() for file in files):
        raise OSError(f"--data {path}: no file of it has 2 bytes; expected at least 2, as the second is predicted from the first")
    return files
