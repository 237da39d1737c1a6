"""Public signatures, choices of backends and keys of every state_dict are those of net.json, which ``tests.helpers.net`` writes."""

import json

import pytest

from tests.helpers import net


@pytest.mark.parametrize(
    ("name", "made"),
    [("signatures", net.signatures), ("choices", net.choices), ("state_dict keys", net.state_keys)],
    ids=lambda x: str(x)[:12],
)
def test_what_users_see_is_as_it_was(name: str, made: object) -> None:
    before, now = json.loads(net.FILE.read_text(encoding="utf-8"))[name], made()  # type: ignore[operator]
    # as text, which has the order of parameters by place
    texts = {key: (json.dumps(before.get(key)), json.dumps(now.get(key))) for key in {**before, **now}}
    different = {key: pair for key, pair in texts.items() if pair[0] != pair[1]}
    assert not different, f"python -m tests.helpers.net writes a new file, if these {len(different)} are meant: {different}"
