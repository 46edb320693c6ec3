"""``save_pretrained``: the saved model computes what the trained one does."""

import errno
import json
import os
import sys
import types

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import miniray
from miniray.core.local import spawner
from miniray.errors import CheckpointError
from miniray.rl import CharTokenizer, GRPOConfig, GRPOTrainer, PPOConfig, PPOTrainer, Sampling
from miniray.train import (
    DataParallelTrainer,
    DDPTrainer,
    PipelineParallelTrainer,
    TorchWorker,
    load_model,
    pretrained,
)

transformers = pytest.importorskip("transformers")

TOKENS = torch.arange(12).view(2, 6)


@pytest.fixture(scope="module", autouse=True)
def _engine():
    with pytest.MonkeyPatch.context() as patch:
        # Load the model's module once for all workers.
        modules = (*spawner.PRELOAD, transformers.LlamaForCausalLM.__module__)
        patch.setattr(spawner, "PRELOAD", modules)
        with miniray.init(num_cpus=4):
            yield


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    """Replace the fixture of the package, which stops the engine after each test."""
    monkeypatch.chdir(tmp_path)


def make_llama(tie=False):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=tie,
    )
    return transformers.LlamaForCausalLM(config)


def make_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(13))]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


class Llama(TorchWorker):
    def setup(self, tie=False):
        self.model = make_llama(tie)
        self.tokenizer = make_tokenizer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        tokens = torch.randint(3, 16, (8, 6), generator=torch.Generator().manual_seed(1))
        self.train_loader = DataLoader(TensorDataset(tokens), batch_size=2)

    def training_step(self, batch, batch_idx):
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss


class Linear(Llama):
    def setup(self):
        self.model = nn.Linear(6, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.train_loader = DataLoader(TensorDataset(torch.ones(8, 6)), batch_size=2)

    def training_step(self, batch, batch_idx):
        return self.model(batch[0]).mean()


class CharWorker(Llama):
    def setup(self):
        super().setup()
        self.tokenizer = CharTokenizer("ab")


def compute_logits(model):
    model.eval()
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def check_saved(path, weights, tie=False, has_tokenizer=True):
    """Check that the model in ``path`` has these weights, which differ from the initial ones."""
    initial = make_llama(tie)
    before = compute_logits(initial)
    initial.load_state_dict(weights)
    expected = compute_logits(initial)
    assert not torch.allclose(before, expected)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(compute_logits(loaded), expected)
    assert json.loads((path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert (path / "model.safetensors").is_file()
    if has_tokenizer:
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        assert tokenizer("w0 w1")["input_ids"] == [3, 4]
    assert [p.name for p in path.parent.iterdir() if ".partial" in p.name] == []


@pytest.mark.parametrize(
    ("trainer", "options"),
    [
        (DataParallelTrainer, {}),
        (DataParallelTrainer, {"mode": "async"}),
        (DDPTrainer, {}),
        (DDPTrainer, {"shard": "full"}),
    ],
    ids=["data_parallel", "async", "ddp", "fsdp"],
)
def test_logits_after_reload(tmp_path, trainer, options):
    with trainer(2, worker=Llama, progress=False, **options) as trainer:
        trainer.train(epochs=1)
        path = trainer.save_pretrained(tmp_path / "model")
        assert path == tmp_path / "model"
        check_saved(path, trainer.model_weights())
        trainer.train(epochs=1)  # the ranks are unchanged
        check_saved(trainer.save_pretrained(path), trainer.model_weights())


@pytest.mark.parametrize("shard", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_tied_weights(tmp_path, shard):
    with DDPTrainer(2, worker=Llama, shard=shard, progress=False) as trainer:
        trainer.train(epochs=1, tie=True)
        check_saved(trainer.save_pretrained(tmp_path / "model"), trainer.model_weights(), tie=True)


@pytest.mark.parametrize(
    ("trainer", "config", "options"),
    [
        (GRPOTrainer, GRPOConfig, {"num_workers": 2}),
        (PPOTrainer, PPOConfig, {"num_workers": 1}),
    ],
    ids=["grpo", "ppo"],
)
def test_policy_of_rl(tmp_path, trainer, config, options):
    trainer = trainer(
        make_llama,
        lambda row, response: float(len(response)),
        [{"prompt": "w0 w1"}] * 4,
        tokenizer=make_tokenizer,
        config=config(prompts_per_step=4, rollouts=2, lr=0.01),
        sampling=Sampling(max_new_tokens=4),
        progress=False,
        **options,
    )
    with trainer:
        trainer.train(steps=1)
        path = trainer.save_pretrained(tmp_path / "model")
        weights = trainer.model_weights()
    policy = {k.removeprefix("model."): v for k, v in weights.items() if k.startswith("model.")}
    check_saved(path, policy)


def test_plain_model_raises_with_its_class(tmp_path):
    with DDPTrainer(2, worker=Linear, progress=False) as trainer:
        trainer.train(epochs=1)
        with pytest.raises(TypeError, match=r"torch\.nn\.modules\.linear\.Linear"):
            trainer.save_pretrained(tmp_path / "model")
        assert not (tmp_path / "model").exists()
        trainer.train(epochs=1)  # the ranks are unchanged
        weights = load_model(trainer.save_final_model())
        assert torch.equal(weights["weight"], trainer.model_weights()["weight"])


def test_pipeline_raises(tmp_path):
    trainer = PipelineParallelTrainer(
        2,
        model=lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        data=DataLoader(TensorDataset(torch.ones(8, 2), torch.ones(8, 1)), 4),
        progress=False,
    )
    with trainer:
        trainer.train(epochs=1)
        with pytest.raises(TypeError, match="TorchWorker"):
            trainer.save_pretrained(tmp_path / "model")


def test_tokenizer_without_save_pretrained_warns(tmp_path):
    with DataParallelTrainer(1, worker=CharWorker, progress=False) as trainer:
        trainer.train(epochs=1)
        with pytest.warns(UserWarning, match="CharTokenizer"):
            path = trainer.save_pretrained(tmp_path / "model")
        check_saved(path, trainer.model_weights(), has_tokenizer=False)


def test_before_train_raises(tmp_path):
    with pytest.raises(RuntimeError, match="train"):
        DataParallelTrainer(1, worker=Llama).save_pretrained(tmp_path / "model")


# -- without a trainer -----------------------------------------------------------------------------


def make_writer(owner, model):
    def write(directory, send_files):
        return pretrained.write_model(owner, model, directory, send_files)

    return write


def test_other_files_are_kept(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("mine", "file"):
        with pytest.raises(FileExistsError):
            pretrained.save_pretrained(tmp_path / name, make_writer(None, make_llama()))
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_failed_save_leaves_the_old_model(tmp_path, monkeypatch):
    path = pretrained.save_pretrained(tmp_path / "model", make_writer(None, make_llama()))
    before = {p.name: p.read_bytes() for p in path.iterdir()}

    class FullDisk(transformers.LlamaForCausalLM):
        def save_pretrained(self, directory):
            (tmp_path / "reached").touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    model = FullDisk(make_llama().config)
    with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)) as caught:
        pretrained.save_pretrained(path, make_writer(None, model))
    assert caught.value.entry == str(path)
    assert (tmp_path / "reached").exists()
    assert {p.name: p.read_bytes() for p in path.iterdir()} == before
    assert {p.name for p in tmp_path.iterdir()} == {"model", "reached"}


def test_files_of_a_remote_worker(tmp_path, monkeypatch):
    """On a cluster, the worker sends the files."""
    model = make_llama()
    owner = types.SimpleNamespace(tokenizer=make_tokenizer())
    saved = pretrained.write_model(owner, model, str(tmp_path / "absent"), send_files=True)
    assert not (tmp_path / "absent").exists()
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(saved.files)
    checked = pretrained.SavedFiles(saved.model_class, True)
    path = pretrained.save_pretrained(
        tmp_path / "model", lambda directory, _: saved if directory else checked
    )
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path)
    model.eval()
    assert torch.equal(compute_logits(loaded), compute_logits(model))


def test_peft_model_saves_its_adapter(tmp_path, monkeypatch):
    """A stand-in for PEFT, which isn't a test dependency: only the call is checked."""

    class PeftModel(nn.Module):
        def save_pretrained(self, directory, **kwargs):
            with open(f"{directory}/adapter_config.json", "w") as file:
                json.dump(sorted(kwargs), file)

    monkeypatch.setitem(sys.modules, "peft", types.SimpleNamespace(PeftModel=PeftModel))
    path = pretrained.save_pretrained(tmp_path / "adapter", make_writer(None, PeftModel()))
    assert json.loads((path / "adapter_config.json").read_text()) == []
