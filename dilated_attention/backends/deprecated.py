"""Former names of the backend interface, which backends outside this package may still use, with a DeprecationWarning."""

from __future__ import annotations

from typing import Any

from dilated_attention.backends.base import AttentionRequest, Capabilities
from dilated_attention.backends.selection import NESTED_CAPABILITIES


class Facts(Capabilities):
    """``Capabilities`` whose ``compute_capabilities`` may also be given and read as ``capabilities``."""

    def __init__(self, *, capabilities: Any = None, **fields: Any) -> None:
        super().__init__(**{"compute_capabilities": capabilities} | fields)

    @property
    def capabilities(self) -> Any:
        return self.compute_capabilities


# former name: (the object, its name now)
RENAMED: dict[str, tuple[Any, str]] = {
    "Facts": (Facts, "Capabilities"),
    "Request": (AttentionRequest, "AttentionRequest"),
    "NESTED_FACTS": (NESTED_CAPABILITIES, "NESTED_CAPABILITIES"),
}
