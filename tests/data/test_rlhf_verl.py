"""RLHFDataset as verl's ``custom_cls``, by verl's own code; skipped where verl is not installed."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
OmegaConf = pytest.importorskip("omegaconf").OmegaConf
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler  # noqa: E402
from verl.utils.dataset.rl_dataset import collate_fn as verl_collate  # noqa: E402
from verl.utils.dataset.rl_dataset import get_dataset_class  # noqa: E402

from miniray.data.rlhf import RLHFDataset, collate_fn  # noqa: E402


def picture(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), value, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def path(tmp_path: Path) -> str:
    rows = [
        {
            "data_source": "test",
            "prompt": [{"role": "user", "content": f"<image> number {i}"}],
            "images": [{"bytes": picture(10 * i), "path": None}],
            "ability": "geolocation",
            "reward_model": {"style": "rule", "ground_truth": {"lat": float(i), "lon": 0.0}},
            "extra_info": {"split": "train", "index": i},
        }
        for i in range(10)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=4)
    return str(tmp_path / "rows.parquet")


def config(custom: bool, tmp_path: Path, **options: Any) -> Any:
    custom_cls = {"path": "pkg://miniray.data.rlhf" if custom else None, "name": "RLHFDataset"}
    keys = {
        "custom_cls": custom_cls,
        "cache_dir": str(tmp_path / "cache"),
        "filter_overlong_prompts": False,
        "max_prompt_length": 64,
        "shuffle": False,
        "seed": 1,
        "train_batch_size": 4,
    }
    return OmegaConf.create({**keys, **options})


class Processor:
    """verl requires a processor only if rows have images."""


def test_the_same_rows_as_verl_itself(path: str, tmp_path: Path) -> None:
    ours = create_rl_dataset([path], config(True, tmp_path), None, Processor())
    theirs = create_rl_dataset([path], config(False, tmp_path), None, Processor())
    assert type(ours) is get_dataset_class(config(True, tmp_path)) is RLHFDataset
    assert len(ours) == len(theirs) == 10
    for mine, other in zip((ours[i] for i in range(10)), theirs, strict=True):
        assert set(other) - set(mine) <= {"prompt"}  # which verl keeps beside raw_prompt
        for key in ("data_source", "ability", "reward_model", "extra_info", "index"):
            assert mine[key] == other[key]
        assert mine["dummy_tensor"].tolist() == other["dummy_tensor"].tolist()
        first, second = mine["raw_prompt"][0]["content"]
        expected = other["raw_prompt"][0]["content"]
        assert second == expected[1]
        assert first["image"].tobytes() == expected[0]["image"].tobytes()


def test_through_verls_loader(path: str, tmp_path: Path) -> None:
    """Sampler, stateful loader, collate function and DataProto are verl's; resume is exact."""
    settings = config(True, tmp_path, shuffle=True)
    dataset = create_rl_dataset([path], settings, None, Processor(), max_samples=8)

    def loader() -> Any:
        return StatefulDataLoader(
            dataset,
            batch_size=4,
            sampler=create_rl_sampler(settings, dataset),
            collate_fn=verl_collate,
            drop_last=True,
        )

    first = loader()
    batch = DataProto.from_single_dict(next(iter(first)))
    assert len(batch) == 4
    seen = batch.non_tensor_batch["index"].tolist()
    again = loader()
    again.load_state_dict(first.state_dict())
    (rest,) = list(again)
    assert len({*seen, *rest["index"].tolist()}) == 8
    images, _, _ = asyncio.run(
        RLHFDataset.process_multi_modal_info(rest["raw_prompt"][0], 14, settings)
    )
    assert images is not None
    assert images[0].getpixel((0, 0)) == (10 * rest["index"][0],) * 3


def test_collate_is_equivalent(path: str, tmp_path: Path) -> None:
    dataset = create_rl_dataset([path], config(True, tmp_path), None, Processor())
    rows = [dataset[i] for i in range(3)]
    mine, theirs = collate_fn(rows), verl_collate(rows)
    assert set(mine) == set(theirs)
    for key, value in theirs.items():
        assert type(mine[key]) is type(value)
        assert mine[key].shape == value.shape
        assert mine[key].dtype == value.dtype
