"""``generate``: continues a text with a saved model and prints each character as soon as it is drawn."""

from __future__ import annotations

import argparse
import codecs
import sys
from pathlib import Path

import torch

from dilated_attention import models
from dilated_attention.cli.arguments import count
from dilated_attention.cli.checkpoint import add_checkpoint, opened
from dilated_attention.parsing import UsageError, size


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    usage = "%(prog)s DIR (--prompt TEXT | --prompt-file FILE) [options]"
    parser = commands.add_parser("generate", usage=usage, help="continue a text with a saved model of bytes or bases")
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
    # arguments that are no UTF-8 are given back as the bytes that they were
    text: bytes = args.prompt.encode(errors="surrogateescape") if args.prompt_file is None else args.prompt_file.read_bytes()
    if not text:
        raise UsageError("the prompt is empty; expected at least one character to continue from")
    models.Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    with opened(args, autocast=False) as (model, vocabulary, _, device, _):
        generator = torch.Generator(device)
        # torch's own first seed is always the same
        generator.manual_seed(generator.seed() if args.seed is None else args.seed)
        sampling = models.Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, generator=generator)
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
        print(decoder.decode(b"", final=True), end="\n" if sys.stdout.isatty() else "", flush=True)
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
