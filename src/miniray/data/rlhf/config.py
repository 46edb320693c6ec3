"""Configuration of ``RLHFDataset`` with verl's keys."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from miniray.checks import (
    check_bool,
    check_choice,
    check_int,
    find_similar,
    suggest_options,
    unknown_option,
)

Truncation = Literal["error", "left", "right", "middle"]

#: Keys of verl that are similar to one of ours but mean something else.
_ELSEWHERE = {"tokenizer"}


@suggest_options()
@dataclass(frozen=True)
class RLHFConfig:
    """verl's keys with their defaults, and three keys of miniray.

    Attributes:
        max_prompt_length: Prompts are padded on the left to this many tokens. Longer ones are left
            out (``filter_overlong_prompts``), truncated (``truncation``), or an error.
        filter_overlong_prompts_workers: Threads per rank that count tokens, 1 by default.
        shuffle: Use a different order in each epoch, and draw ``max_samples`` rows by ``seed``
            instead of taking the first ones.
        tokenize: Return token ids. ``False`` returns messages, which rollouts of verl 0.6 and later
            tokenize. True by default, and False inside such a verl.
        row_order: ``"window"``, ``"global"`` or ``"file"``, to override ``shuffle``.
    """

    prompt_key: str = "prompt"
    image_key: str = "images"
    video_key: str = "videos"
    max_prompt_length: int = 1024
    truncation: Truncation = "error"
    filter_overlong_prompts: bool = True
    filter_overlong_prompts_workers: int | None = None
    shuffle: bool = False
    seed: int | None = None
    return_raw_chat: bool = False
    return_full_prompt: bool = False
    return_multi_modal_inputs: bool = True
    need_tools_kwargs: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    tool_config_path: str | None = None
    function_tool_path: str | None = None
    tokenize: bool | None = None
    row_order: Literal["window", "global", "file"] | None = None
    memory_budget: int | str = "256MB"

    def __post_init__(self) -> None:
        check_choice("truncation", self.truncation, ("error", "left", "right", "middle"))
        check_choice("row_order", self.row_order, (None, "window", "global", "file"))
        for name in ("max_prompt_length", "filter_overlong_prompts_workers"):
            if (value := getattr(self, name)) is not None:
                check_int(name, value, 1)
        if self.seed is not None:
            check_int("seed", self.seed)
        for field_ in dataclasses.fields(self):
            value = getattr(self, field_.name)
            if field_.type == "bool" or (field_.type == "bool | None" and value is not None):
                check_bool(field_.name, value)
        if self.tool_config_path or self.function_tool_path:
            raise ValueError(
                "tool_config_path and function_tool_path are read by verl's tool registry. Give the"
                " schemas themselves: apply_chat_template_kwargs={'tools': [...]}"
            )


def read_config(config: Any) -> RLHFConfig:
    """Create an ``RLHFConfig`` from a dict, a dataclass, a namespace, an OmegaConf node or None.

    Keys that verl reads elsewhere are ignored. A key that is similar to one of ours is a
    misspelling and raises ``TypeError``, because it would have no effect.
    """
    if isinstance(config, RLHFConfig):
        return config
    given = _as_dict(config)
    known = {f.name: f for f in dataclasses.fields(RLHFConfig)}
    for key in set(given) - set(known) - _ELSEWHERE:
        if find_similar(str(key), known, 0.85):
            raise unknown_option("RLHFConfig", str(key), known)
    # In YAML files, None stands for the default.
    chosen = {key: given[key] for key in known if given.get(key) is not None}
    if "tokenize" not in chosen and "custom_cls" in given and _verl_tokenizes():
        chosen["tokenize"] = False
    return RLHFConfig(**chosen)


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, Mapping):
        return {key: _plain(config[key]) for key in config}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config)}
    if hasattr(config, "__dict__"):
        return {key: _plain(value) for key, value in vars(config).items()}
    raise TypeError(
        f"config must be a dict, a dataclass, a namespace or an OmegaConf node, not {config!r}"
    )


def _plain(value: Any) -> Any:
    """Convert OmegaConf's containers to dicts and lists."""
    if isinstance(value, Mapping):
        return {key: _plain(value[key]) for key in value}
    if type(value).__name__ == "ListConfig":
        return [_plain(item) for item in value]
    return value


def _verl_tokenizes() -> bool:
    """Return whether the installed verl tokenizes in its rollout."""
    import importlib.metadata

    try:
        version = importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:
        return False
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= (0, 6)
