"""Checkpoints: all or nothing, configuration and weights that belong together, and files that are damaged."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dilated_attention.integrations.torchscale import load_torchscale
from dilated_attention.models import LongNetConfig, LongNetLM
from tests.package.test_files import failing

safetensors = pytest.importorskip("safetensors.torch")


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


def untied(folder: Path) -> None:
    """As it was saved before weights held their configuration."""
    path = folder / "model.safetensors"
    safetensors.save_file(safetensors.load_file(path), path, metadata={"format": "pt"})


def test_weights_that_fail_leave_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model(1).save_pretrained(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for error in (OSError(28, "No space left on device"), KeyboardInterrupt(), safetensors_error()):
        with monkeypatch.context() as patch:
            patch.setattr(safetensors, "save_file", raising(error))
            with pytest.raises((OSError, KeyboardInterrupt)) as caught:
                model(2).save_pretrained(tmp_path)
        assert version_of(tmp_path) == 1
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert re.search(r"model\.safetensors could not be written, and the previous file is untouched: .*space", str(caught.value))


def safetensors_error() -> Exception:
    from safetensors import SafetensorError

    return SafetensorError("I/O error: No space left on device (os error 28)")


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("was_tied", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "interrupted"])
@pytest.mark.filterwarnings("ignore:saving into .* was interrupted")
def test_a_failure_at_any_call_leaves_a_whole_model(error: BaseException, was_tied: bool, tmp_path: Path) -> None:
    found = set()
    for at in range(1, 200):
        folder = tmp_path / str(at)
        model(1).save_pretrained(folder)
        if not was_tied:
            untied(folder)
        with pytest.MonkeyPatch.context() as patch:
            count = failing(patch, at, error)
            try:
                model(2).save_pretrained(folder)
                failed = False
            except type(error):
                failed = True
        found.add((failed, version_of(folder)))
        if failed:
            # and the next one succeeds
            model(3).save_pretrained(folder)
            assert version_of(folder) == 3
        beside = {path.name for path in folder.iterdir()} - {"config.json", "model.safetensors", ".save_pretrained.lock"}
        assert all(name.startswith((".config.json.part-", ".model.safetensors.part-")) for name in beside)
        if count[0] < at:
            break
    assert 10 < at < 199
    assert {(True, 1), (False, 2)} <= found <= {(True, 1), (True, 2), (False, 2)}


def test_between_the_two_renames_the_new_model_is_loaded_with_a_warning(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    old = (tmp_path / "config.json").read_bytes()
    model(2).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes(old)
    with pytest.warns(UserWarning, match=r"was interrupted before config\.json was replaced"):
        assert version_of(tmp_path) == 2
    # nothing was there before: a first save that was interrupted
    (tmp_path / "config.json").unlink()
    assert version_of(tmp_path) == 2


def test_files_that_do_not_belong_together_are_refused_with_the_way_out(tmp_path: Path) -> None:
    for version in (1, 2, 3):
        model(version).save_pretrained(tmp_path / str(version))
    shutil.copy(tmp_path / "1" / "config.json", tmp_path / "2")
    with pytest.raises(
        ValueError,
        match=r"2/config\.json is not the configuration that .*2/model\.safetensors was saved with: rotary_base is 100\.0, there 200\.0",
    ) as caught:
        LongNetLM.from_pretrained(tmp_path / "2")
    assert "delete config.json" in str(caught.value)
    (tmp_path / "2" / "config.json").unlink()
    assert version_of(tmp_path / "2") == 2
    # written otherwise, it is the same
    path = tmp_path / "3" / "config.json"
    path.write_text(json.dumps(dict(reversed(json.loads(path.read_text()).items()))))
    assert version_of(tmp_path / "3") == 3


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_damaged_configuration_in_the_weights_is_refused(is_alone: bool, tmp_path: Path) -> None:
    """Saved twice, config.json is what was there before, too: the one in the weights passed for a newer one."""
    for _ in range(2):
        model(1).save_pretrained(tmp_path)
    if is_alone:
        (tmp_path / "config.json").unlink()
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'rotary_base\\": 100.0', b'rotary_base\\": 108.0'))
    assert path.read_bytes() != whole
    with pytest.raises(ValueError, match=r"the configuration in .*model\.safetensors is damaged: .*copy or download it again"):
        LongNetLM.from_pretrained(tmp_path)


def test_checkpoints_without_the_tie_load_by_their_configuration(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    untied(tmp_path)
    assert version_of(tmp_path) == 1
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rotary_base": 700.0}))
    assert LongNetLM.from_pretrained(tmp_path).config.rotary_base == 700.0
    (tmp_path / "config.json").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"config\.json does not exist, and .*model\.safetensors holds no configuration; expected a folder"
    ):
        LongNetLM.from_pretrained(tmp_path)


def test_saved_files_may_be_read_as_others_of_this_user(tmp_path: Path) -> None:
    """Whatever mode the writer of safetensors gives its files."""
    (tmp_path / "plain").write_text("")
    model(1).save_pretrained(tmp_path)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"] == modes["plain"]


def test_a_loaded_model_saves_over_its_own_files(tmp_path: Path) -> None:
    """Its weights are a view of the file."""
    model(1).save_pretrained(tmp_path)
    loaded = LongNetLM.from_pretrained(tmp_path)
    model(2).save_pretrained(tmp_path)
    assert all(float(p.max()) == 1 for p in loaded.parameters())
    loaded.save_pretrained(tmp_path)
    assert version_of(tmp_path) == 1


def test_a_kill_in_the_middle_leaves_a_whole_model(tmp_path: Path) -> None:
    models = [model(1), model(2)]
    models[0].save_pretrained(tmp_path)
    for kill in range(12):
        child = os.fork()
        if child == 0:
            for i in range(10_000):
                models[i % 2].save_pretrained(tmp_path)
            os._exit(0)
        time.sleep(0.01 + 0.003 * kill)
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *args, **kwargs: None)
            assert version_of(tmp_path) in (1, 2)
    # and what was left beside goes with the next save
    models[0].save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_processes_that_save_into_one_folder_take_turns(tmp_path: Path) -> None:
    children = []
    for version in (1, 2, 3):
        child = os.fork()
        if child == 0:
            try:
                for _ in range(20):
                    model(version).save_pretrained(tmp_path)
                    # whoever saves meanwhile
                    assert version_of(tmp_path) in (1, 2, 3)
            except BaseException:  # noqa: BLE001 - told by the exit code
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert version_of(tmp_path) in (1, 2, 3)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_weights_that_are_replaced_while_they_are_opened_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Safetensors opens the file twice: the header came from one model and the weights from the next."""
    for version in (1, 2):
        model(version).save_pretrained(tmp_path / str(version))
    from_file, moves = torch.UntypedStorage.from_file, [tmp_path / "2" / "model.safetensors"]

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if moves:
            moves.pop().rename(tmp_path / "1" / "model.safetensors")
        return from_file(*args, **kwargs)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", staticmethod(replaced))
    with pytest.raises(ValueError, match=r"config\.json is not the configuration that .*model\.safetensors was saved with"):
        version_of(tmp_path / "1")
    assert not moves
    (tmp_path / "1" / "config.json").unlink()
    assert version_of(tmp_path / "1") == 2


def test_what_has_no_values_or_a_part_of_them_is_not_saved(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    config = model(2).config
    with pytest.raises(ValueError, match=r"embedding\.weight is on the device meta and has no values"):
        LongNetLM(config, device="meta").save_pretrained(tmp_path)
    spread = model(2)
    with pytest.MonkeyPatch.context() as patch:
        # as a DTensor has it
        patch.setattr(torch.Tensor, "full_tensor", lambda self: self, raising=False)
        with pytest.raises(ValueError, match=r"is sharded over processes \(a Tensor\); gather the weights with .*get_model_state_dict"):
            spread.save_pretrained(tmp_path)
    assert version_of(tmp_path) == 1


CONFIGS = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe\x00",
    "deep": b"[" * 10_000 + b"]" * 10_000,
    "a list": b"[]",
    "twice": b'{"embed_dim": 8, "embed_dim": 8}',
    "unknown key": {"colour": "red"},
    "a string": {"embed_dim": "8"},
    "a float": {"embed_dim": 8.0},
    "null": {"num_layers": None},
    "beyond float": {"rotary_base": 10**400},
    "infinite": b'{"vocab_size": 11, "embed_dim": 8, "num_layers": 1, "num_heads": 2, "attention": "dense", "rotary_base": 1e999}',
    "a size beyond torch's": {"vocab_size": 10**30},
    "a deep pattern": {"attention": "block_sparse", "rotary_base": 10000.0, "block_pattern": "[" * 10_000},
    "a living pattern": {"attention": "block_sparse", "block_pattern": '"object:1"'},
    "cut off": b'{"embed_dim": 8, "num',
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("what", CONFIGS)
def test_a_spoilt_configuration_is_a_value_error_with_its_file_and_a_way_out(what: str, tied: bool, tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    if not tied:
        untied(tmp_path)
    path, spoilt = tmp_path / "config.json", CONFIGS[what]
    path.write_bytes(spoilt if isinstance(spoilt, bytes) else json.dumps(json.loads(path.read_text()) | spoilt).encode())
    for load in (LongNetLM.from_pretrained, lambda folder: LongNetConfig.load(folder / "config.json")):
        with pytest.raises(ValueError, match=re.escape(str(path))) as caught:
            load(tmp_path)
        if load == LongNetLM.from_pretrained:
            assert ("delete config.json" if tied else f"LongNetConfig(…).save('{path}')") in str(caught.value)


@pytest.mark.parametrize("name", ["model.safetensors", "theirs.safetensors", "theirs.pt"])
@pytest.mark.parametrize("what", ["empty", "garbage", "text", "zeros", "cut", "cut near the end", "longer", "of another format"])
def test_spoilt_weights_are_a_value_error_with_their_file_and_a_way_out(what: str, name: str, tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    path = tmp_path / name
    state = model(1).state_dict()
    if path.suffix == ".pt":
        torch.save({"model": state}, path)
    elif name != "model.safetensors":
        safetensors.save_file({key: value.clone() for key, value in state.items()}, path)
    whole = path.read_bytes()
    other = b"PK\x03\x04" if path.suffix == ".safetensors" else (64).to_bytes(8, "little") + b'{"a":{"dtype":"F32"}}'
    path.write_bytes(
        {
            "empty": b"",
            "garbage": bytes(range(7, 256, 3)) * 9,
            "text": b"<!DOCTYPE html><html>404</html>\n",
            "zeros": bytes(3000),
            "cut": whole[: len(whole) // 2],
            "cut near the end": whole[:-20],
            "longer": whole + b"x" if path.suffix == ".safetensors" else whole[4:],
            "of another format": other + whole,
        }[what]
    )
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} cannot be read as .*copy or download it again"):
        LongNetLM.from_pretrained(tmp_path) if name == "model.safetensors" else load_torchscale(path, kind="encoder")


@pytest.mark.parametrize("value", [[1, 2], torch.ones(3), {"a": 1}, {}])
def test_files_of_other_things_than_weights_are_named(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt"):
        load_torchscale(tmp_path / "other.pt", kind="encoder")


def test_a_runs_folder_has_the_model_of_its_end_or_names_the_command_that_writes_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (9, 10):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
        (run / "checkpoints" / f"step-{step:08d}" / "run.json").write_text("{}")
    # removed or written in part
    (run / "checkpoints" / "step-00000011").mkdir()
    way_out = re.escape(f"with the run's script and --resume {run} --steps 10")
    with pytest.raises(FileNotFoundError, match=rf"{run} has no model yet, .* after step 10: .* {way_out}"):
        LongNetLM.from_pretrained(run)
    model(3).save_pretrained(run / "checkpoint")
    for stopped, step, said in (
        (False, 10, None),
        (True, 10, "is the model of step 10, after which the run was stopped"),
        (True, 8, rf"is the model of step 8, and the run has been trained to step 10: .* {way_out}"),
        (False, 8, rf"is the model of step 8, and the run has been trained to step 10: .* {way_out}"),
        (False, 12, None),
    ):
        (run / "checkpoint" / "run.json").write_text(json.dumps({"step": step, "stopped": stopped}))
        for folder in (run, run / "checkpoint"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert version_of(folder) == 3
            assert len(caught) == (said is not None)
            assert said is None or re.search(said, str(caught[0].message)), caught[0].message


def test_folders_and_missing_files(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / ("of " + name)
        model(1).save_pretrained(folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        with pytest.raises(ValueError, match=rf"{name} is a folder; expected a folder written by save_pretrained, with"):
            LongNetLM.from_pretrained(folder)
        with pytest.raises(IsADirectoryError, match=name):
            model(2).save_pretrained(folder)
    with pytest.raises(FileNotFoundError, match="written by save_pretrained"):
        LongNetLM.from_pretrained(tmp_path / "config.json")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "theirs.pt", "theirs.safetensors"])
def test_what_may_not_be_read_is_a_permission_error_with_its_file(name: str, tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    (tmp_path / "theirs.pt").write_bytes(b"")
    (tmp_path / "theirs.safetensors").write_bytes(b"")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(0o755)
    (tmp_path / name).chmod(0)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match=re.escape(str(tmp_path / name))):
            load_torchscale(tmp_path / name) if name.startswith("theirs") else LongNetLM.from_pretrained(tmp_path)
    finally:
        os.seteuid(0)


def test_more_layers_than_weights_are_refused_before_they_are_built(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    untied(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_layers": 10**9}))
    with pytest.raises(RuntimeError, match=r"model\.safetensors has \d+ weights, too few for the 1000000000 layers"):
        LongNetLM.from_pretrained(tmp_path)


def test_weights_that_are_no_floats_are_refused_by_name(tmp_path: Path) -> None:
    model(1).save_pretrained(tmp_path)
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    safetensors.save_file(weights | {"embedding.weight": weights["embedding.weight"].int()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors has embedding\.weight in torch\.int32; expected weights of a floating dtype"):
        LongNetLM.from_pretrained(tmp_path)
