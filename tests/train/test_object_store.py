"""Checkpoints in an object store: a real server for the S3 API on this machine."""

import shutil
import urllib.request

import pytest

from tests.train.test_checkpoint_dir import list_names, read_events, train

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")

URL = "s3://bucket/runs/a"


@pytest.fixture
def s3(monkeypatch):
    """Start a server with an empty bucket."""
    import s3fs

    started = server.ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(f"{endpoint}/moto-api/reset", data=b"", timeout=10).close()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("bucket")
    yield started
    s3fs.S3FileSystem.clear_instance_cache()
    started.stop()


def test_run_continues_from_the_object_store(s3):
    train(URL, 3, keep_last=2)
    assert list_names(URL) == ["epoch-00000001", "epoch-00000002"]
    shutil.rmtree("runs")
    resumed, trainer = train(URL, 5, resume="auto", keep_last=2)
    assert (trainer.epoch, len(trainer.history)) == (5, 5)
    assert resumed == train(None, 5, name="whole")[0]
    assert list_names(URL) == ["epoch-00000003", "epoch-00000004"]


@pytest.mark.slow
def test_training_continues_without_the_object_store(s3):
    def stop_server(epoch):
        if epoch == 1:
            s3.stop()

    with pytest.warns(UserWarning, match=URL) as warned:
        _, trainer = train(URL, 3, on_epoch_start=stop_server)
    assert trainer.epoch == 3
    assert len([w for w in warned if URL in str(w.message)]) == 1
    events = [event["event"] for event in read_events()]
    assert events.count("checkpoint_copy_failed") == 2
