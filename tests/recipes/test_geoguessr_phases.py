"""The recipe's checks by hand, and the parts they share."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")


def test_compare_notices(recipe):
    import checks

    checks.compare([[1, 2], [3]], 3)
    with pytest.raises(AssertionError, match="row 2 is on ranks 0 and 1"):
        checks.compare([[1, 2], [2]], 3)
    with pytest.raises(AssertionError, match="not 4"):
        checks.compare([[1, 2], [3]], 4)
    with pytest.raises(AssertionError, match="uneven"):
        checks.compare([[1, 2, 3], [4]], 4)
    with pytest.raises(AssertionError, match="2 different rows"):
        checks.compare([[1, 1], [2]], 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        ["test_phase1_data_sharding.py", "--rows", "60"],
        ["test_phase2_ray_workers.py", "--rows", "60", "--workers", "2"],
        ["worker_with_dataloader.py", "--rows", "60"],
    ],
)
def test_by_hand(recipe, script):
    command = [sys.executable, str(recipe / script[0]), *script[1:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("ok ") for line in done.stdout.splitlines())


def test_the_true_place_is_checked(files, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq
    from byte_tokenizer import ByteTokenizer
    from geoguessr_dataset_distributed import GeoguessrRLHFDatasetDistributed

    from miniray.errors import DataError, RowError

    rows = pq.read_table(files[0]).slice(0, 2).to_pylist()
    rows[1]["reward_model"]["ground_truth"]["lat"] = 90.5
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    config = {"max_prompt_length": 256, "filter_overlong_prompts": False}
    dataset = GeoguessrRLHFDatasetDistributed(
        str(tmp_path / "bad.parquet"), ByteTokenizer(), config
    )
    truth = rows[0]["reward_model"]["ground_truth"]
    assert dataset[0]["place"].tolist() == [truth["lat"], truth["lon"]]
    assert ByteTokenizer().decode(dataset[0]["raw_prompt_ids"]).startswith("user\n<image>\nWhere")
    with pytest.raises(RowError, match=r"row 1: .*no place on Earth"):
        dataset[1]
    for nowhere in (None, {"style": "rule", "ground_truth": None}):
        with pytest.raises(DataError, match=r"the ground truth \{\} is no place on Earth"):
            dataset.encode({**rows[0], "reward_model": nowhere})
    assert len(json.dumps(dataset.state_dict())) < 1000


def test_byte_tokenizer(recipe):
    from byte_tokenizer import END, START, ByteTokenizer

    tokenizer = ByteTokenizer()
    messages = [{"role": "user", "content": "né"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == [START, *b"user\n", *"né".encode(), END, START, *b"assistant\n"]
    assert tokenizer.decode(ids) == "user\nnéassistant\n"
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer(text)["input_ids"] == ids


def test_the_example_of_the_readme(recipe, files, tmp_path, monkeypatch):
    text = (recipe / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "data").symlink_to(Path(files[0]).parent)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    assert len(names["dataset"]) == 15
    assert names["batch"]["input_ids"].shape == (15, 256)
    assert names["batch"]["place"].shape == (15, 2)
