"""Saved models: one file that is the old one or the new one, and files that are damaged or of others. Files that are replaced, JSON."""

import json
import os
import re
import signal
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dilated_attention.integrations.torchscale import load_torchscale
from dilated_attention.models import LongNetConfig, LongNetLM
from dilated_attention.modules import DilatedAttention
from dilated_attention.pattern import DilatedPattern

FILE = "model.safetensors"


def model(version: int) -> LongNetLM:
    """Equal shapes for all versions; the configuration and each weight tell which it is."""
    config = LongNetConfig(vocab_size=11, embed_dim=8, num_layers=1, num_heads=2, attention="dense", rotary_base=100.0 * version)
    made = LongNetLM(config)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(version)
    return made


def version_of(folder: Path) -> int:
    """Of what ``from_pretrained`` loads, which must be of one version throughout."""
    loaded = LongNetLM.from_pretrained(folder)
    versions = {loaded.config.rotary_base / 100, *(float(x) for p in loaded.state_dict().values() for x in (p.min(), p.max()))}
    assert len(versions) == 1, versions
    return int(versions.pop())


def as_two_files(folder: Path, **changes: Any) -> None:
    """As an early version saved it, or as weights are made by hand: the configuration beside them."""
    (folder / "config.json").write_text(json.dumps(LongNetLM.from_pretrained(folder).config.to_dict() | changes))
    safetensors.torch.save_file(safetensors.torch.load_file(folder / FILE), folder / FILE, metadata={"format": "pt"})


def _picture(folder: Path, version: int) -> None:
    DilatedPattern([4], [1]).show(4 * version, 1, path=str(folder / "pattern.png"))


WRITERS: dict[str, Callable[[Path, int], Any]] = {
    "picture": _picture,
    "configuration": lambda folder, version: model(version).config.save(folder / "config.json"),
    "model": lambda folder, version: model(version).save_pretrained(folder),
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("what", WRITERS)
@pytest.mark.parametrize(
    ("call", "error"), [("fsync", OSError(28, "No space left on device")), ("replace", KeyboardInterrupt()), ("mkdir", KeyboardInterrupt())]
)
def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside(what: str, error: BaseException, call: str, tmp_path: Path) -> None:
    WRITERS[what](tmp_path, 1)
    old = contents(tmp_path)
    for name, data in old.items():
        (tmp_path / name).chmod(0o640)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(os, call, lambda *args, **kwargs: (_ for _ in ()).throw(error))
            WRITERS[what](tmp_path, 2)
        assert contents(tmp_path) == old and stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640
        WRITERS[what](tmp_path, 2)
        assert contents(tmp_path).keys() == {name} and contents(tmp_path)[name] != data
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


def test_a_replaced_file_keeps_its_link_and_a_new_one_has_the_usual_mode(tmp_path: Path) -> None:
    config, path, link = model(1).config, tmp_path / "a.json", tmp_path / "link.json"
    path.write_text("old")
    link.symlink_to(path)
    config.save(link)
    assert link.is_symlink() and LongNetConfig.load(path) == config
    model(1).save_pretrained(tmp_path / "model")
    # whatever mode the writer of safetensors gives its files
    assert (tmp_path / "model" / FILE).stat().st_mode == path.stat().st_mode
    for place, error in ((tmp_path, IsADirectoryError), (tmp_path / "nowhere" / "a.json", FileNotFoundError)):
        with pytest.raises(error, match=str(place)):
            config.save(place)
    config.save("/dev/null")
    assert not Path("/dev/null").is_file()
    config.save(tmp_path / ("é" * 120 + ".json"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_may_not_be_read_or_written_is_a_permission_error_with_its_file(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    names = (FILE, "theirs.pt", "theirs.safetensors")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o777)
    for name in names:
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0)
    os.seteuid(65534)
    try:
        for name in names:
            with pytest.raises(PermissionError, match=re.escape(str(tmp_path / name))):
                load_torchscale(tmp_path / name) if name.startswith("theirs") else LongNetLM.from_pretrained(tmp_path)
        with pytest.raises(PermissionError, match=FILE):
            model(2).save_pretrained(tmp_path)
    finally:
        os.seteuid(0)
    assert version_of(tmp_path) == 1


def test_a_model_that_others_save_is_loaded_whole_also_after_a_kill(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    loaded, children = LongNetLM.from_pretrained(tmp_path), []
    for version in (2, 3):
        child = os.fork()
        if child == 0:
            while True:
                model(version).save_pretrained(tmp_path)
        children.append(child)
    try:
        assert {version_of(tmp_path) for _ in range(60)} <= {1, 2, 3}
    finally:
        for child in children:
            time.sleep(0.01)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert version_of(tmp_path) in (1, 2, 3)
    # its weights are a view of the first file
    loaded.save_pretrained(tmp_path)
    assert version_of(tmp_path) == 1


def test_weights_that_are_replaced_while_they_are_opened_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors opens the file twice: the header came from one model and the weights from the next."""
    for version in (1, 2):
        model(version).save_pretrained(tmp_path / str(version))
    from_file, moves = torch.UntypedStorage.from_file, [tmp_path / "2" / FILE]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if moves:
            moves.pop().rename(tmp_path / "1" / FILE)
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", staticmethod(replaced))
    assert version_of(tmp_path / "1") == 2 and not moves


def test_what_has_no_values_or_a_part_of_them_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"embedding\.weight is on the device meta and has no values"):
        LongNetLM(model(2).config, device="meta").save_pretrained(tmp_path)
    spread = model(2)
    with pytest.MonkeyPatch.context() as patch:
        # as a DTensor has it
        patch.setattr(torch.Tensor, "full_tensor", lambda self: self, raising=False)
        with pytest.raises(ValueError, match=r"is sharded over processes \(a Tensor\); gather the weights with .*get_model_state_dict"):
            spread.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_configuration_beside_the_weights_counts_where_they_have_none(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    model(2).config.save(tmp_path / "config.json")
    assert version_of(tmp_path) == 1
    as_two_files(tmp_path)
    assert version_of(tmp_path) == 1
    as_two_files(tmp_path, num_layers=10**9)
    with pytest.raises(RuntimeError, match=r"model\.safetensors has \d+ weights, too few for the 1000000000 layers"):
        LongNetLM.from_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"holds no configuration, and .*config\.json does not exist; expected a folder of save_pretrained"
    ):
        LongNetLM.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="written by save_pretrained"):
        LongNetLM.from_pretrained(tmp_path / "config.json")


CONFIGS: dict[str, tuple[bytes | dict[str, Any], str]] = {
    "not UTF-8": (b"\xff\xfe\x00", "can't decode byte"),
    "deep": (b"[" * 10_000 + b"]" * 10_000, "recursion"),
    "cut off": (b'{"embed_dim": 8, "num', "is not JSON"),
    "digits": (b'{"a": ' + b"1" * 5000 + b"}", "digits"),
    "twice": (b'{"embed_dim": 8, "num_layers": 2, "embed_dim": 8}', "a key of embed_dim, num_layers occurs twice"),
    "unknown key": ({"colour": "red"}, "unknown keys colour"),
    "a string": ({"embed_dim": "8"}, "embed_dim"),
    "beyond float": ({"rotary_base": 10**400}, "rotary_base|too large"),
    "a size beyond torch's": ({"vocab_size": 10**30}, "vocab_size"),
    "a deep pattern": ({"attention": "block_sparse", "rotary_base": 10000.0, "block_pattern": "[" * 10_000}, "BlockPattern"),
}


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("what", CONFIGS)
def test_a_spoilt_configuration_is_a_value_error_with_its_file(what: str, inside: bool, tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    spoilt, said = CONFIGS[what]
    text = spoilt if isinstance(spoilt, bytes) else json.dumps(model(1).config.to_dict() | spoilt).encode()
    if inside and what != "not UTF-8":
        metadata = {"format": "pt", "dilated_attention.config": text.decode()}
        safetensors.torch.save_file(safetensors.torch.load_file(tmp_path / FILE), tmp_path / FILE, metadata=metadata)
        with pytest.raises(ValueError, match=rf"^the configuration in {tmp_path / FILE} .*({said})"):
            LongNetLM.from_pretrained(tmp_path)
        return
    as_two_files(tmp_path)
    (tmp_path / "config.json").write_bytes(text)
    for load in (LongNetLM.from_pretrained, lambda folder: LongNetConfig.load(folder / "config.json")):
        with pytest.raises(ValueError, match=rf"^{tmp_path / 'config.json'} .*({said})"):
            load(tmp_path)


@pytest.mark.parametrize("name", [FILE, "theirs.safetensors", "theirs.pt"])
@pytest.mark.parametrize("what", ["empty", "garbage", "cut", "cut near the end", "longer", "of another format"])
def test_spoilt_weights_are_a_value_error_with_their_file_and_a_way_out(what: str, name: str, tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    path, state = tmp_path / name, model(1).state_dict()
    if path.suffix == ".pt":
        torch.save({"model": state}, path)
    elif name != FILE:
        safetensors.torch.save_file({key: value.clone() for key, value in state.items()}, path)
    whole, is_safe = path.read_bytes(), path.suffix == ".safetensors"
    spoilt = {
        "empty": b"",
        "garbage": bytes(range(7, 256, 3)) * 9,
        "cut": whole[: len(whole) // 2],
        "cut near the end": whole[:-20],
        "longer": whole + b"x" if is_safe else whole[4:],
        "of another format": (b"PK\x03\x04" if is_safe else (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}') + whole,
    }
    path.write_bytes(spoilt[what])
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} cannot be read as .*copy or download it again"):
        LongNetLM.from_pretrained(tmp_path) if name == FILE else load_torchscale(path, kind="encoder")


def test_files_of_other_things_than_weights_are_named(tmp_path: Path) -> None:
    for value in ([1, 2], torch.ones(3), {"a": 1}, {}):
        torch.save(value, tmp_path / "other.pt")
        with pytest.raises(ValueError, match=r"other\.pt"):
            load_torchscale(tmp_path / "other.pt", kind="encoder")
    model(1).save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / FILE)
    safetensors.torch.save_file(weights | {"embedding.weight": weights["embedding.weight"].int()}, tmp_path / FILE)
    with pytest.raises(ValueError, match=r"model\.safetensors has embedding\.weight in torch\.int32; expected weights of a floating dtype"):
        LongNetLM.from_pretrained(tmp_path)


def test_a_runs_folder_has_the_model_of_its_end_or_names_the_command_that_writes_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (9, 10):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step:08d}" / "run.json").write_text("{}")
    # removed or written in part
    (run / "checkpoints" / "step-00000011").mkdir()
    way_out = re.escape(f"write that model with the run's script and --resume {run} --steps 10")
    with pytest.raises(FileNotFoundError, match=rf"{run} has no model yet, .* after step 10: {way_out}"):
        LongNetLM.from_pretrained(run)
    model(3).save_pretrained(run / "checkpoint")
    for stopped, step, said in (
        (False, 10, None),
        (True, 10, "is the model of step 10, after which the run was stopped"),
        (True, 8, rf"is the model of step 8, and the run has been trained to step 10: {way_out}"),
        (False, 8, rf"is the model of step 8, and the run has been trained to step 10: {way_out}"),
        (False, 12, None),
    ):
        (run / "checkpoint" / "run.json").write_text(json.dumps({"step": step, "stopped": stopped}))
        for folder in (run, run / "checkpoint"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert version_of(folder) == 3
            assert len(caught) == (said is not None)
            assert said is None or re.search(said, str(caught[0].message)), caught[0].message
    for spoilt in ("", "[]", "{}", '{"step": "x", "stopped": true}', '{"step": null}'):
        (run / "checkpoint" / "run.json").write_text(spoilt)
        with pytest.raises(ValueError, match=r"run\.json is damaged \(.*copy it again, or remove it"):
            LongNetLM.from_pretrained(run)


def test_sinks_without_a_size_are_saved_and_loaded_as_lazy_modules_do() -> None:
    module = DilatedAttention([16], [2], sinks=True)
    module.load_state_dict(module.state_dict())
    # what somebody added is saved beside them
    other = DilatedAttention([16], [2], sinks=True)
    other.register_buffer("steps", torch.zeros(1))
    other.temperature = torch.nn.Parameter(torch.ones(1))
    assert {name: x.requires_grad for name, x in other.state_dict().items()} == {"sinks": True, "steps": False, "temperature": False}
    with pytest.raises(RuntimeError, match="received <class 'list'>"):
        module.load_state_dict({"sinks": [0.0, 0.0]})
    module.load_state_dict({"sinks": torch.ones(3)})
    assert torch.equal(module.sinks, torch.ones(3))
