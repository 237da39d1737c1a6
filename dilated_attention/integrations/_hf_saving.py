"""Saved models keep their attention: ``attn_implementation`` is written to config.json and to adapter_config.json, and read again.

Transformers leaves the implementation out of what it saves, and PEFT knows none. No hook of either adds it, so that ``register`` wraps
methods: of configs ``to_dict`` and ``from_dict``; of PEFT's adapters ``to_dict``, ``from_peft_type``, ``save_pretrained`` and
``load_adapter``. A model or an adapter that has nothing to do with this library is written and read as before.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

from dilated_attention.integrations._hf_settings import CONFIG_KEY, REGISTERED, base_of, configs_of, name_of, settings_to_save

_NAME = "attn_implementation"


def install() -> None:
    """Wraps the methods, once, of transformers and, where it is installed, of PEFT."""
    config = importlib.import_module("transformers.configuration_utils").PretrainedConfig
    _wrap(config, "to_dict", _config_to_dict)
    _wrap(config, "from_dict", _config_from_dict)
    if importlib.util.find_spec("peft") is None:
        return
    try:
        peft = importlib.import_module("peft")
    except ImportError:
        # a PEFT that cannot be imported saves and loads nothing
        return
    model = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    _wrap(peft.PeftConfig, "to_dict", _adapter_to_dict)
    _wrap(peft.PeftConfig, "from_peft_type", _adapter_from_peft_type)
    for each in (peft.PeftModel, model):
        _wrap(each, "save_pretrained", _save_adapters)
    for each in (peft.PeftModel, peft.PeftMixedModel, model):
        _wrap(each, "load_adapter", _load_adapter)
    # where the method of all AutoPeftModelFor… classes is
    _wrap(peft.AutoPeftModelForCausalLM, "from_pretrained", _auto_from_pretrained)


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replaces a method by ``wrapper``, which gets the method before its own arguments."""
    inherited = next(each for each in owner.__mro__ if name in vars(each))
    found = vars(inherited)[name]
    method = found.__func__ if isinstance(found, classmethod) else found
    if getattr(method, "_keeps_attention", False):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    wrapped._keeps_attention = True  # type: ignore[attr-defined]
    setattr(inherited, name, classmethod(wrapped) if isinstance(found, classmethod) else wrapped)


def _config_to_dict(original: Callable[..., dict[str, Any]], config: Any) -> dict[str, Any]:
    output, name, configs = original(config), name_of(config), configs_of(config)
    if any(_is_ours(each) for each in configs):
        output[CONFIG_KEY] = settings_to_save(name, config) if name in REGISTERED else output.get(CONFIG_KEY, {})
        # a string would hold for the configs within this one, too; these write their own
        output[_NAME] = name if len(configs) == 1 else {"": name} if name in REGISTERED else {}
    elif name and CONFIG_KEY in output:
        # another implementation was chosen: None leaves it to transformers, as for every model, and from_dict does not warn
        output[_NAME] = None
    return output


def _config_from_dict(original: Callable[..., Any], cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
    if CONFIG_KEY in config_dict and kwargs.get(_NAME) is None:
        if config_dict.get(_NAME) is not None:
            # transformers before 5.4 overwrites what was saved by the argument, given or not
            kwargs[_NAME] = config_dict[_NAME]
        elif _NAME not in config_dict:
            warnings.warn(
                f"config.json has settings in {CONFIG_KEY!r} and no {_NAME}: models made from it have transformers' own attention. "
                f'For the attention of these settings load with {_NAME}="dilated" (or the name it was trained with), and save again',
                stacklevel=2,
            )
    return original(cls, config_dict, **kwargs)


def _is_ours(config: Any) -> bool:
    return name_of(config) in REGISTERED


def _note(model: Any) -> None:
    """Notes a base model's attention in the configs of its adapters, of which ``to_dict`` writes it."""
    config = next((each for each in configs_of(getattr(base_of(model), "config", None)) if _is_ours(each)), None)
    for adapter in model.peft_config.values():
        vars(adapter).pop(CONFIG_KEY, None)
        if config is not None:
            name = name_of(config)
            setattr(adapter, CONFIG_KEY, {_NAME: name, **settings_to_save(name, config)})


def _save_adapters(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if getattr(model, "peft_config", None):
        _note(model)
    return original(model, *args, **kwargs)


def _adapter_to_dict(original: Callable[..., dict[str, Any]], adapter: Any) -> dict[str, Any]:
    # a key that PEFT does not have: where this library is not imported, PEFT warns of it
    noted = vars(adapter).get(CONFIG_KEY)
    return original(adapter) | ({CONFIG_KEY: noted} if noted else {})


def _adapter_from_peft_type(original: Callable[..., Any], cls: Any, **kwargs: Any) -> Any:
    noted = kwargs.pop(CONFIG_KEY, None)
    adapter = original(cls, **kwargs)
    if noted:
        setattr(adapter, CONFIG_KEY, noted)
    return adapter


def _auto_from_pretrained(original: Callable[..., Any], cls: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
    """The base model is loaded by PEFT, so that nobody but the adapter says with which attention."""
    if kwargs.get(_NAME) is None:
        noted = vars(importlib.import_module("peft").PeftConfig.from_pretrained(path, **kwargs)).get(CONFIG_KEY)
        if noted:
            kwargs[_NAME] = noted[_NAME]
    return original(cls, path, *args, **kwargs)


def _load_adapter(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    result, base = original(model, *args, **kwargs), base_of(model)
    for adapter, peft_config in model.peft_config.items():
        noted = vars(peft_config).get(CONFIG_KEY)
        if noted and hasattr(base, "config"):
            _compare(base, adapter, dict(noted))
    return result


def _compare(base: Any, adapter: str, noted: dict[str, Any]) -> None:
    """Hands the settings of an adapter to its base model, and warns where the base model has other ones or another attention."""
    name = noted.pop(_NAME)
    configs = configs_of(base.config)
    for config in configs:
        if getattr(config, CONFIG_KEY, None) is None:
            setattr(config, CONFIG_KEY, dict(noted))
    present = getattr(base.config, CONFIG_KEY)
    differing = sorted(option for option in noted.keys() & present.keys() if noted[option] != present[option])
    if differing:
        warnings.warn(
            f"adapter {adapter!r} was trained with {', '.join(f'{option}={noted[option]!r}' for option in differing)}; its base model has "
            f"{', '.join(f'{option}={present[option]!r}' for option in differing)}. For the adapter's settings call configure on the model",
            stacklevel=2,
        )
    if not any(_is_ours(config) for config in configs):
        warnings.warn(
            f"adapter {adapter!r} was trained with {_NAME}={name!r}; its base model has {name_of(base.config)!r}, which computes "
            f"something else. Load the base model with {_NAME}={name!r}, or call set_attn_implementation({name!r}) on it"
            + ("" if name in REGISTERED else f", after register({name!r}, …)"),
            stacklevel=2,
        )
