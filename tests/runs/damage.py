"""A run directory with every kind of file, and random damage to it."""

import json
import os
import socket

from miniray.doctor import model
from miniray.doctor.box import Box
from miniray.doctor.layout import BLOB_HEAD, BOX_SIZE, INFO_AT, INFO_SIZE, Cell
from miniray.doctor.samples import PassWriter

SITE = ["train.py", 3, "main"]
INFO = {
    "rank": 0,
    "local_rank": 0,
    "world_size": 2,
    "local_world_size": 2,
    "pid": 2**22 + 7,
    "started": 12345,
    "host": socket.gethostname(),
    "launcher": "miniray",
    "command": "python train.py",
    "attempt": 0,
    "backend": "gloo",
    "group_rank": 0,
    "group_size": 2,
    "initialised": True,
    "distributed_available": True,
    "heartbeat_interval": 1.0,
    "gpu": {
        "index": 0,
        "name": "H200",
        "uuid": "GPU-1",
        "memory_total": 2**37,
        "power_limit": 700.0,
    },
    "first_nonfinite": {
        "step": 2,
        "epoch": 0,
        "value": "nan",
        "samples": [1, 2],
        "site": SITE,
        "at": 5.0,
    },
    "models": [
        {
            "name": "Net",
            "parameters": 2,
            "elements": 20,
            "digest": "aa",
            "names": ["weight (4, 4) float32"],
            "buffers": 0,
            "find_unused": False,
            "static_graph": False,
            "device": "cpu",
            "site": SITE,
            "unused": ["bias"],
            "unused_step": 1,
        }
    ],
    "loaders": [
        {
            "index": 0,
            "dataset": "TensorDataset",
            "length": 32,
            "batches": 4,
            "batch_size": 8,
            "num_workers": 0,
            "drop_last": False,
            "persistent_workers": False,
            "sampler": "DistributedSampler",
            "replicas": 2,
            "sampler_rank": 0,
            "shuffle": True,
            "seed": 0,
            "set_epoch_calls": 1,
            "passes": 1,
            "finished": 0,
            "last_batches": 0,
            "empty_batches": 0,
            "trained": True,
            "first_batch": ["ab"],
            "site": SITE,
        }
    ],
    "notes": {
        "python": "3.11",
        "memory": [[float(i), i, 10**8] for i in range(20)],
        "asked": {"rank": 0, "world_size": 2, "place": "127.0.0.1:1"},
        "checksums": {"1": "aa", "2": "bb"},
        "in_flight": {"step": 0, "type": "ValueError", "message": "bad", "site": SITE},
        "steps_before_epoch": 3,
        "gpu_count": 8,
    },
}
RUN = {
    "format": 1,
    "name": "x",
    "state": "failed",
    "started": "2026-01-02T00:00:00+00:00",
    "ended": "2026-01-02T00:01:00+00:00",
    "error": {"type": "ValueError", "message": "bad label", "traceback": "Traceback ..."},
    "seed": 0,
    "world_size": 2,
    "config": {"trainer": "T", "hang_timeout": 5.0, "unit": "step", "lr": 0.1},
    "versions": {"miniray": "0.1.0", "torch": None},
    "host": socket.gethostname(),
    "platform": "Linux",
    "pid": 2**22 + 5,
    "process_started": 1.0,
    "command": "python train.py",
    "attempts": [{"started": "2026-01-01T00:00:00+00:00", "state": "died", "world_size": 2}],
    "sync": {"num_syncs": 3, "bytes": 100, "seconds": {"collect": 1.0}, "divergence": {"max": 1}},
}
SEEN = {"code": 1, "signal": "", "at": 5.0, "by_launcher": False}
METRICS = [{"epoch": i, "loss": 1.0 / (i + 1), "seconds": 1.0, "num_samples": 8} for i in range(5)]
EVENTS = [{"time": "2026-01-02T00:00:01+00:00", "event": "restart", "worker": 1, "reason": "x"}]
FINDING = {"code": "exception", "severity": "failed", "title": "rank 1 raised", "evidence": ["a"],
           "cause": "b", "fix": "c"}  # fmt: skip
VERDICT = {"findings": [FINDING], "notes": []}

HOSTILE_VALUES = [
    None, True, 0, -1, 2**31, 2**63, 10**12, -(10**40), 10**4000, 0.5, float("nan"), float("inf"),
    1e308, "", "x", "NaN", "\\NaN", "\ud800", "\x1b[31m", "²", "9" * 30,
    [], [1], [[]], {}, {"a": {}}, [None] * 3, "x" * 100_000,
]  # fmt: skip


def nested(depth, kind):
    return ("[" if kind else '{"a":') * depth + "1" + ("]" if kind else "}") * depth


def write_run(folder):
    (folder / "ranks").mkdir(parents=True)
    for rank in range(2):
        write_record(folder / "ranks" / f"{rank}.box", {**INFO, "rank": rank})
        (folder / "ranks" / f"{rank}.exit").write_text(json.dumps(SEEN))
        (folder / "ranks" / f"{rank}.log").write_text("terminate: what(): bad\n" * 3)
        (folder / "ranks" / f"{rank}.stack").write_text(
            'Current thread 0x1 (most recent call first):\n  File "train.py", line 3 in main\n'
        )
    write_text_files(folder)


def write_text_files(folder, run=RUN, metrics=METRICS, events=EVENTS, verdict=VERDICT):
    (folder / "run.json").write_text(json.dumps(run))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (folder / "doctor.json").write_text(json.dumps(verdict))
    (folder / "doctor.txt").write_text("FAILED: rank 1 raised\n")


def write_record(path, info):
    box = Box.create(path)
    text = json.dumps(info).encode()  # write_info() accepts dicts only
    box._write_blob(INFO_AT, INFO_SIZE, text[: INFO_SIZE - BLOB_HEAD.size])
    for number in range(30):
        what = box.what(model.COLLECTIVE, "all_reduce", "SUM", "default", "float32",
                        "train.py\x003\x00main", (4, 8))  # fmt: skip
        box.event(what, number, number == 29, True)
    box.ints[Cell.STEP] = 12
    box.ints[Cell.SAMPLES] = 96
    writer = PassWriter(box, 0, 0)
    writer.add(range(100))
    box.write_exit({"kind": "exception", "type": "ValueError", "message": "bad", "site": SITE,
                    "traceback": "", "at": 5.0})  # fmt: skip
    box.close()


def replace_value(random, value):
    """Return a copy of ``value`` with a hostile value at a random place."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        key = random.choice(list(value))
        return {**value, key: replace_value(random, value[key])}
    if isinstance(value, list) and value and random.random() < 0.9:
        index = random.randrange(len(value))
        return [*value[:index], replace_value(random, value[index]), *value[index + 1 :]]
    return random.choice(HOSTILE_VALUES)


def damage_bytes(random, path):
    data = bytearray(path.read_bytes())
    # In a record, most of the interesting bytes are in the cells, the rings and the JSON.
    areas = [(0, 2000), (64, 64 + 1024), (INFO_AT, INFO_AT + 600), (0, len(data))]
    for _ in range(random.randint(1, 40)):
        low, high = random.choice(areas if len(data) == BOX_SIZE else areas[3:])
        data[random.randrange(low, high)] = random.choice((0, 1, 0x7F, 0x80, 0xFF))
    path.write_bytes(data)


def replace_file(random, path):
    """Put something that isn't a regular file in its place, or a huge or deeply nested one."""
    path.unlink()
    kind = random.randrange(9)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    elif kind == 2:
        path.symlink_to(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to("/dev/tty")
    elif kind == 5:
        with open(path, "wb") as file:
            file.truncate(1 << 40)
    elif kind == 6:
        path.write_text(nested(100_000, random.random() < 0.5))
    elif kind == 7:
        path.write_text(nested(500, random.random() < 0.5))
    else:
        path.write_bytes(b"")


def damage(random, folder):
    """Damage one or two files of a run that ``write_run`` wrote. Returns what was done."""
    done = []
    for _ in range(random.randint(1, 2)):
        path = random.choice(sorted(p for p in folder.rglob("*") if p.is_file()))
        how = random.choice(("bytes", "truncate", "replace", "value", "value"))
        done.append(f"{how} {path.relative_to(folder)}")
        if how == "bytes" and path.stat().st_size:
            damage_bytes(random, path)
        elif how == "truncate":
            os.truncate(path, random.randrange(path.stat().st_size + 1))
        elif how == "replace":
            replace_file(random, path)
        elif random.random() < 0.5:
            path = folder / "ranks" / "0.box"
            if path.is_file():
                path.unlink()
                write_record(path, replace_value(random, INFO))
        else:
            path = folder / "ranks" / "1.exit"
            if path.is_file() and not path.is_symlink():
                path.write_text(json.dumps(replace_value(random, SEEN)))
            parts = {"run": RUN, "metrics": METRICS, "events": EVENTS, "verdict": VERDICT}
            key = random.choice(list(parts))
            value = replace_value(random, parts[key])
            if isinstance(value, list) or key in ("run", "verdict"):
                names = ("run.json", "metrics.jsonl", "events.jsonl", "doctor.json")
                if all((folder / name).is_file() for name in names):
                    write_text_files(folder, **{key: value})
    return done
