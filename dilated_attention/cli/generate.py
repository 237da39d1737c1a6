"""``generate``: continues a text with a saved model and prints each character as soon as it is drawn."""

from __future__ import annotations

import argparse
import codecs
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dilated_attention.cli.arguments import count, device_of
from dilated_attention.cli.checkpoint import add_checkpoint, computing, load
from dilated_attention.parsing import UsageError, size

if TYPE_CHECKING:
    import torch

    from dilated_attention.models import Vocabulary


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate",
        usage="%(prog)s DIR (--prompt TEXT | --prompt-file FILE) [options]",
        help="continue a text with a saved model of bytes or bases",
    )
    add_checkpoint(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="text to continue, or bases: letters A, C, G, T, N")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file of it; for bases also FASTA with one record, plain or .gz")
    parser.add_argument("--max-new-tokens", type=size, default=256, metavar="N", help="bytes or bases to add; default: 256")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the softmax; 0 takes the likeliest; default: 1")
    parser.add_argument("--top-k", type=size, metavar="K", help="draw from the K likeliest only; default: from all")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the fewest likeliest whose probabilities sum to P; default: 1")
    parser.add_argument("--seed", type=count, help="of the draws; default: another one each time")
    parser.add_argument("--stop", metavar="TEXT", help="end once this text has been printed")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    import torch

    from dilated_attention.models import Sampling, generate_stream

    if args.stop == "":
        raise UsageError("--stop is empty; expected a text that ends the output, or leave it out")
    text = _prompt(args)
    device = device_of(args.device)
    generator = torch.Generator(device)
    if args.seed is None:
        # torch's own first seed is always the same
        generator.seed()
    else:
        generator.manual_seed(args.seed)
    sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)
    model, vocabulary = load(args, device)
    with computing(model, args, device, autocast=False):
        prompt = model.encode(_tokens(args, text, vocabulary))
        ending = b"" if args.stop is None else vocabulary.decode_bytes(vocabulary.encode(args.stop.encode(errors="surrogateescape")))
        if args.stop is not None and not ending:
            raise UsageError(f"--stop has no {vocabulary.unit}s; expected a text that ends the output, or leave it out")
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        last = b""
        for token in generate_stream(model, prompt, args.max_new_tokens, sampling=sampling):
            character = vocabulary.decode_bytes(token % len(vocabulary))
            _write(decoder.decode(character))
            last = (last + character)[-len(ending) :] if ending else b""
            if ending and last == ending:
                break
        _write(decoder.decode(b"", final=True))
    if sys.stdout.isatty():
        print()
    return 0


def _prompt(args: argparse.Namespace) -> bytes:
    """Returns the prompt's bytes, which are at least one."""
    option = "--prompt" if args.prompt_file is None else f"--prompt-file {args.prompt_file}"
    # arguments that are no UTF-8 are given back as the bytes that they were
    if args.prompt_file is None:
        text: bytes = args.prompt.encode(errors="surrogateescape")
    elif args.prompt_file.is_dir() or not args.prompt_file.exists():
        what = "is a folder" if args.prompt_file.is_dir() else "does not exist"
        raise OSError(f"{option} {what}; expected a file, or give --prompt TEXT")
    else:
        text = args.prompt_file.read_bytes()
    if not text:
        raise UsageError(f"{option} is empty; expected at least one character to continue from")
    return text


def _tokens(args: argparse.Namespace, text: bytes, vocabulary: Vocabulary) -> torch.Tensor:
    from dilated_attention.models import read_fasta

    if vocabulary.unit == "base" and args.prompt_file is not None and text[:1] in (b">", b"\x1f"):
        records = read_fasta(args.prompt_file)
        if len(records) > 1:
            raise ValueError(f"--prompt-file {args.prompt_file} holds {len(records)} records; expected one, which is continued")
        tokens = records[0][1]
    else:
        tokens = vocabulary.encode(text)
    if not len(tokens):
        raise ValueError(f"the prompt has no {vocabulary.unit}s; expected at least one to continue from")
    return tokens


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), end="", flush=True)
