"""RLHFDataset with a real tokenizer and a real processor, built here without any hub."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

from miniray.data.rlhf import RLHFDataset, collate_fn  # noqa: E402
from miniray.data.rlhf.config import RLHFConfig, read_config  # noqa: E402
from miniray.data.rlhf.prompt import rgb  # noqa: E402
from miniray.errors import DataError, RowError  # noqa: E402

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }} "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
WORDS = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<image>", "user", "assistant", "where"]
PAD, UNK, START, END, IMAGE, USER, ASSISTANT, WHERE = range(8)
# Tokens that the template adds to n words "where": 2 before, 1 after, 2 to start the answer.
AROUND = 5


def make_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(WORDS)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>", "<image>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> Any:
    """LLaVA's, for images of 28 x 28 in patches of 14: an image is 4 tokens."""
    transformers = pytest.importorskip("transformers")
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}
    )
    return transformers.LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token="<image>",
    )


def jpeg(value: int = 128, size: tuple[int, int] = (32, 32)) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((*size, 3), value, np.uint8)).save(buffer, "JPEG")
    return buffer.getvalue()


def row(index: int, words: int = 1, picture: bytes | None = None) -> dict[str, Any]:
    text = " ".join(["where"] * words)
    return {
        "data_source": "test",
        "prompt": [{"role": "user", "content": f"<image> {text}" if picture else text}],
        "images": [{"bytes": picture, "path": None}] if picture else [],
        "ability": "geolocation",
        "reward_model": {"style": "rule", "ground_truth": {"lat": 1.0 * index, "lon": -1.0}},
        "extra_info": {"split": "train", "index": index},
    }


def write(path: Path, rows: list[dict[str, Any]], group: int = 4) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=group)
    return str(path)


@pytest.fixture
def twenty(tmp_path: Path) -> str:
    """Row i has i + 1 words."""
    return write(tmp_path / "rows.parquet", [row(i, words=i + 1) for i in range(20)])


def indices(dataset: Any) -> list[int]:
    return [found["index"] for found in dataset]


class TestFields:
    def test_text(self, tmp_path: Path, tokenizer: Any) -> None:
        path = write(tmp_path / "a.parquet", [row(7, words=2)])
        config = {"max_prompt_length": 9, "return_raw_chat": True, "return_full_prompt": True}
        found = RLHFDataset(path, tokenizer, config)[0]
        ids = [START, USER, WHERE, WHERE, END, START, ASSISTANT]
        assert found["input_ids"].tolist() == [PAD, PAD, *ids]
        assert found["attention_mask"].tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 1]
        assert found["position_ids"].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6]
        assert found["raw_prompt_ids"] == ids
        assert found["raw_prompt"] == [{"role": "user", "content": "where where"}]
        assert found["full_prompts"] == (
            "<|im_start|>user where where<|im_end|><|im_start|>assistant "
        )
        assert found["index"] == 7
        assert found["tools_kwargs"] == {}
        assert found["interaction_kwargs"] == {}
        assert found["data_source"] == "test"
        assert found["ability"] == "geolocation"
        assert found["reward_model"]["ground_truth"] == {"lat": 7.0, "lon": -1.0}
        assert "prompt" not in found
        assert "images" not in found
        assert "multi_modal_data" not in found

    def test_images_with_a_processor(self, tmp_path: Path, tokenizer: Any, processor: Any) -> None:
        path = write(tmp_path / "a.parquet", [row(0, picture=jpeg(200))])
        found = RLHFDataset(path, tokenizer, {"max_prompt_length": 12}, processor)[0]
        expanded = [START, USER, *[IMAGE] * 4, WHERE, END, START, ASSISTANT]
        assert found["input_ids"].tolist() == [PAD, PAD, *expanded]
        assert found["raw_prompt_ids"] == [START, USER, IMAGE, WHERE, END, START, ASSISTANT]
        assert set(found["multi_modal_inputs"]) == {"pixel_values"}
        assert found["multi_modal_inputs"]["pixel_values"].shape == (1, 3, 28, 28)
        (image,) = found["multi_modal_data"]["image"]
        assert image.size == (32, 32)

    def test_rows_with_and_without_images_make_a_batch(
        self, tmp_path: Path, tokenizer: Any, processor: Any
    ) -> None:
        path = write(tmp_path / "a.parquet", [row(0, picture=jpeg(200)), row(1)])
        dataset = RLHFDataset(path, tokenizer, {"max_prompt_length": 12}, processor)
        (batch,) = dataset.loader(2)
        assert [list(data) for data in batch["multi_modal_data"]] == [["image"], []]
        assert [list(inputs) for inputs in batch["multi_modal_inputs"]] == [["pixel_values"], []]
        assert batch["raw_prompt_ids"][1] == [START, USER, WHERE, END, START, ASSISTANT]

    def test_inputs_are_left_out_on_request(
        self, tmp_path: Path, tokenizer: Any, processor: Any
    ) -> None:
        path = write(tmp_path / "a.parquet", [row(0, picture=jpeg())])
        config = {"max_prompt_length": 12, "return_multi_modal_inputs": False}
        found = RLHFDataset(path, tokenizer, config, processor)[0]
        assert "multi_modal_inputs" not in found
        assert found["input_ids"].tolist().count(IMAGE) == 4

    def test_images_stay_encoded(self, tmp_path: Path, tokenizer: Any) -> None:
        """Half a picture is noticed when its pixels are wanted, and not before."""
        whole = jpeg(size=(200, 200))
        path = write(tmp_path / "a.parquet", [row(0, picture=whole[: len(whole) * 2 // 3])])
        found = RLHFDataset(path, tokenizer, {"tokenize": False})[0]
        assert found["raw_prompt"][0]["content"] == "<image> where"
        found = RLHFDataset(path, tokenizer, {"max_prompt_length": 9})[0]
        (image,) = found["multi_modal_data"]["image"]
        assert image.size == (200, 200)
        with pytest.raises(OSError, match="truncated"):
            image.load()

    def test_messages_for_a_rollout_that_tokenizes(
        self, tmp_path: Path, tokenizer: Any, processor: Any
    ) -> None:
        path = write(tmp_path / "a.parquet", [row(3, picture=jpeg(250))])
        found = RLHFDataset(path, tokenizer, {"tokenize": False}, processor)[0]
        assert "input_ids" not in found
        assert found["dummy_tensor"].tolist() == [0]
        first, second = found["raw_prompt"][0]["content"]
        assert (first["type"], second) == ("image", {"type": "text", "text": " where"})
        images, videos, audios = asyncio.run(
            RLHFDataset.process_multi_modal_info(found["raw_prompt"], 14, {})
        )
        assert (videos, audios) == (None, None)
        assert images is not None
        assert images[0].getpixel((0, 0)) == (250, 250, 250)

    @pytest.mark.parametrize(
        ("how", "kept"),
        [
            ("left", [WHERE, WHERE, END, START, ASSISTANT]),
            ("right", [START, USER, WHERE, WHERE, WHERE]),
            ("middle", [START, USER, END, START, ASSISTANT]),
        ],
    )
    def test_truncation(self, tmp_path: Path, tokenizer: Any, how: str, kept: list[int]) -> None:
        path = write(tmp_path / "a.parquet", [row(0, words=6)])
        config = {"max_prompt_length": 5, "truncation": how, "filter_overlong_prompts": False}
        found = RLHFDataset(path, tokenizer, config)[0]
        assert found["input_ids"].tolist() == kept
        assert found["raw_prompt_ids"] == kept
        assert found["attention_mask"].tolist() == [1] * 5

    def test_too_long_is_refused_by_name(self, twenty: str, tokenizer: Any) -> None:
        config = {"max_prompt_length": AROUND + 10, "filter_overlong_prompts": False}
        dataset = RLHFDataset(twenty, tokenizer, config)
        assert dataset[9]["index"] == 9
        with pytest.raises(RowError, match=r"\b16\b.*\b15\b") as e:
            dataset[10]
        assert (e.value.file, e.value.row) == (twenty, 10)


class TestCollate:
    def test_tensors_are_stacked_and_the_rest_are_objects(
        self, twenty: str, tokenizer: Any
    ) -> None:
        dataset = RLHFDataset(twenty, tokenizer, {"max_prompt_length": 32})
        batch = collate_fn([dataset[0], dataset[1]])
        assert batch["input_ids"].shape == (2, 32)
        assert batch["raw_prompt_ids"].dtype == object
        assert batch["raw_prompt_ids"].shape == (2,)
        assert [len(ids) for ids in batch["raw_prompt_ids"]] == [AROUND + 1, AROUND + 2]
        assert batch["index"].tolist() == [0, 1]

    def test_rows_with_different_fields_are_refused(self, raises: Any) -> None:
        with raises(DataError):
            collate_fn([{"a": 1, "b": 2}, {"a": 1}])
        with raises(DataError):
            collate_fn([{"a": 1}, {"a": 1, "b": 2}])


class TestWhichRows:
    def test_too_long_ones_are_left_out_and_then_shared(self, twenty: str, tokenizer: Any) -> None:
        config = {"max_prompt_length": AROUND + 15}
        parts = [
            indices(RLHFDataset(twenty, tokenizer, config, rank=r, world_size=2)) for r in (0, 1)
        ]
        assert parts == [list(range(8)), list(range(8, 15))]

    def test_pictures_count_in_the_filter(
        self, tmp_path: Path, tokenizer: Any, processor: Any
    ) -> None:
        rows = [row(0, words=4), row(1, words=1, picture=jpeg()), row(2, words=4, picture=jpeg())]
        path = write(tmp_path / "a.parquet", rows)
        config = {"max_prompt_length": AROUND + 5}
        assert indices(RLHFDataset(path, tokenizer, config, processor)) == [0, 1]

    def test_all_samples(self, twenty: str, tokenizer: Any) -> None:
        for everything in (-1, None, 1000):
            assert len(RLHFDataset(twenty, tokenizer, max_samples=everything)) == 20

    def test_max_samples_after_the_filter(self, twenty: str, tokenizer: Any) -> None:
        config = {"max_prompt_length": AROUND + 15}
        parts = [
            indices(RLHFDataset(twenty, tokenizer, config, max_samples=7, rank=r, world_size=3))
            for r in range(3)
        ]
        assert parts == [[0, 1, 2], [3, 4], [5, 6]]

    @pytest.mark.parametrize("seed", [0, 5])
    def test_a_shuffled_subset_is_one_for_all_ranks(
        self, twenty: str, tokenizer: Any, seed: int
    ) -> None:
        config = {"max_prompt_length": AROUND + 20, "shuffle": True, "seed": seed}
        parts = [
            indices(RLHFDataset(twenty, tokenizer, config, max_samples=9, rank=r, world_size=2))
            for r in (0, 1)
        ]
        assert sorted(map(len, parts)) == [4, 5]
        assert len({*parts[0], *parts[1]}) == 9

    def test_ranks_that_cannot_agree_are_refused(self, twenty: str, tokenizer: Any) -> None:
        with pytest.raises(ValueError, match="seed"):
            RLHFDataset(twenty, tokenizer, {"shuffle": True}, rank=0, world_size=2)

    def test_the_answer_is_kept(self, twenty: str, tokenizer: Any) -> None:
        config = {"max_prompt_length": AROUND + 15}
        assert len(RLHFDataset(twenty, tokenizer, config)) == 15

        class Counting:
            """The same tokenizer, which counts how often it is used."""

            used = 0

            def __getattr__(self, name: str) -> Any:
                return getattr(tokenizer, name)

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                Counting.used += 1
                return tokenizer(*args, **kwargs)

        Counting.__qualname__ = type(tokenizer).__qualname__
        assert len(RLHFDataset(twenty, Counting(), config)) == 15
        assert Counting.used == 0
        assert len(RLHFDataset(twenty, Counting(), {"max_prompt_length": AROUND + 3})) == 3
        assert Counting.used == 20

    def test_another_template_is_another_filter(self, twenty: str, tokenizer: Any) -> None:
        config = {"max_prompt_length": AROUND + 15}
        assert len(RLHFDataset(twenty, tokenizer, config)) == 15
        wordy = make_tokenizer()
        wordy.chat_template = "where where " + TEMPLATE
        assert len(RLHFDataset(twenty, wordy, config)) == 13

    def test_other_messages_are_another_filter(self, twenty: str, tokenizer: Any) -> None:
        """A subclass that changes prompts is distinguished from its base by its code."""

        def subclass(extra: int) -> Any:
            class Wordy(RLHFDataset):
                def build_messages(self, row: Any) -> list[dict[str, Any]]:
                    more = " ".join("where" for _ in range(extra))
                    content = row["prompt"][0]["content"]
                    return [{"role": "user", "content": f"{more} {content}"}]

            return Wordy

        config = {"max_prompt_length": AROUND + 15}
        assert len(RLHFDataset(twenty, tokenizer, config)) == 15
        ids = [
            kind(twenty, tokenizer, config).row_set.filter_id
            for kind in (RLHFDataset, subclass(2), subclass(2), subclass(3))
        ]
        assert ids[1] == ids[2]
        assert len(set(ids)) == 3
        assert len(subclass(2)(twenty, tokenizer, config)) == 13

    def test_images_of_a_subclass_are_part_of_the_filter(
        self, tmp_path: Path, tokenizer: Any
    ) -> None:
        """It may look at any column, without a processor too; other images are another filter."""

        def subclass(column: str) -> Any:
            class Elsewhere(RLHFDataset):
                def images_of(self, row: Any) -> list[Any]:
                    return [row[column]]

            return Elsewhere

        rows = [{**row(i, words=i), "photo": jpeg(), "map": jpeg()} for i in range(4)]
        for each in rows:
            each["prompt"][0]["content"] += " <image>"
        path = write(tmp_path / "a.parquet", rows)
        config = {"max_prompt_length": AROUND + 3}
        photos, maps = (subclass(name)(path, tokenizer, config) for name in ("photo", "map"))
        assert len(photos) == 3  # of 0 to 3 words and an image's place
        assert photos.row_set.filter_id != maps.row_set.filter_id
        assert (
            photos.row_set.filter_id == subclass("photo")(path, tokenizer, config).row_set.filter_id
        )

    def test_a_row_that_fails_is_not_called_too_long(self, tmp_path: Path, tokenizer: Any) -> None:
        rows = [row(0), row(1)]
        rows[1]["prompt"] = [{"role": None, "content": None}]
        path = write(tmp_path / "a.parquet", rows)
        with pytest.raises(RowError) as caught:
            len(RLHFDataset(path, tokenizer, {"max_prompt_length": 9}))
        assert (caught.value.file, caught.value.row) == (path, 1)

    def test_as_many_placeholders_as_images(
        self, tmp_path: Path, tokenizer: Any, raises: Any
    ) -> None:
        bad = row(0, picture=jpeg())
        bad["prompt"] = [{"role": "user", "content": "where"}]
        path = write(tmp_path / "a.parquet", [bad])
        with raises(RowError):
            RLHFDataset(path, tokenizer, {"filter_overlong_prompts": False})[0]

    def test_no_tokenizer(self, twenty: str, raises: Any) -> None:
        with raises(TypeError):
            RLHFDataset(twenty, "gpt2")

    def test_missing_prompt_column(self, twenty: str, tokenizer: Any) -> None:
        config = {"prompt_key": "question", "filter_overlong_prompts": False}
        with pytest.raises(DataError, match="'question'"):
            RLHFDataset(twenty, tokenizer, config)


class TestResume:
    def test_iteration_goes_on_exactly_on_another_number_of_ranks(
        self, twenty: str, tokenizer: Any
    ) -> None:
        config = {"max_prompt_length": AROUND + 20, "shuffle": True, "seed": 3}

        def dataset(rank: int, world_size: int) -> Any:
            return RLHFDataset(twenty, tokenizer, config, rank=rank, world_size=world_size)

        first = [dataset(rank, 2) for rank in (0, 1)]
        seen = []
        for part in first:
            rows = iter(part)
            seen += [next(rows)["index"] for _ in range(4)]
        state = json.loads(json.dumps(first[0].state_dict()))
        for rank in range(3):
            resumed = dataset(rank, 3)
            resumed.load_state_dict(state)
            assert len(resumed) == 4
            seen += indices(resumed)
        assert sorted(seen) == list(range(20))

    def test_loader(self, twenty: str, tokenizer: Any) -> None:
        config = {"max_prompt_length": AROUND + 20, "shuffle": True, "seed": 3}
        loader = RLHFDataset(twenty, tokenizer, config).loader(6)
        batches = iter(loader)
        seen = next(batches)["index"].tolist()
        state = loader.state_dict()
        again = RLHFDataset(twenty, tokenizer, config).loader(6)
        again.load_state_dict(state)
        rest = list(again)
        assert [len(batch["index"]) for batch in rest] == [6, 6, 2]
        assert rest[0]["input_ids"].shape == (6, AROUND + 20)
        assert sorted(seen + [i for b in rest for i in b["index"].tolist()]) == list(range(20))
        loader.close()

    def test_pickled(self, twenty: str, tokenizer: Any) -> None:
        dataset = RLHFDataset(twenty, tokenizer, {"max_prompt_length": AROUND + 15})
        copy = pickle.loads(pickle.dumps(dataset))
        assert indices(copy) == indices(dataset)

    def test_torch_loader(self, twenty: str, tokenizer: Any) -> None:
        dataset = RLHFDataset(twenty, tokenizer, {"max_prompt_length": AROUND + 20})
        assert isinstance(dataset, torch.utils.data.Dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=8, collate_fn=collate_fn)
        assert [batch["input_ids"].shape[0] for batch in loader] == [8, 8, 4]


class TestConfig:
    def test_from_anything(self) -> None:
        @dataclasses.dataclass
        class Mine:
            max_prompt_length: int = 77
            truncation: str = "left"

        expected = RLHFConfig(max_prompt_length=77, truncation="left")
        keys = {"max_prompt_length": 77, "truncation": "left", "seed": None, "train_files": "x"}
        assert read_config(keys) == expected
        assert read_config(SimpleNamespace(**keys)) == expected
        assert read_config(Mine()) == expected
        assert read_config(None) == RLHFConfig()

    def test_from_omegaconf(self) -> None:
        omegaconf = pytest.importorskip("omegaconf")
        node = omegaconf.OmegaConf.create(
            {"max_prompt_length": 77, "apply_chat_template_kwargs": {"tools": [{"name": "a"}]}}
        )
        config = read_config(node)
        assert config.max_prompt_length == 77
        assert type(config.apply_chat_template_kwargs["tools"]) is list

    @pytest.mark.parametrize(
        "config",
        [
            {"truncation": "top"},
            {"max_prompt_length": 0},
            {"tool_config_path": "tools.yaml"},
        ],
    )
    def test_mistakes(self, config: dict[str, Any], raises: Any) -> None:
        with raises(ValueError):
            read_config(config)

    def test_misspelled_key(self) -> None:
        with pytest.raises(TypeError, match="'max_prompt_length'"):
            read_config({"max_promt_length": 5})


def test_an_image_of_16_bits_is_scaled_and_not_cut_off():
    grey = Image.fromarray(np.array([[0, 256, 32768, 65535]], dtype=np.uint16))
    assert np.asarray(rgb(grey))[0, :, 0].tolist() == [0, 1, 128, 255]
