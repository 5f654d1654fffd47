"""The data that a configuration names, and the tokens made from it."""

from __future__ import annotations

import pytest

from mxref_training.config import DataConfig
from mxref_training.errors import ConfigError


@pytest.mark.parametrize("key", ["train", "val", "tokenizer"])
def test_an_empty_path_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"data\.{key} is empty: give a path"):
        DataConfig(**{key: ""})


def test_a_line_has_room_for_a_mebibyte_at_least() -> None:
    with pytest.raises(ConfigError, match="data.max_line_mib = 0 is below 1"):
        DataConfig(max_line_mib=0)
