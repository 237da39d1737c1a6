"""Whether pictures can be drawn: matplotlib is an extra, and its absence must not cost what was computed."""

from __future__ import annotations

import importlib


def can_draw() -> bool:
    """Returns whether matplotlib can be imported, and prints what is missing if it cannot."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        print(f'no pictures, {error}: pip install "dilated-attention[plot]"')
        return False
    return True
