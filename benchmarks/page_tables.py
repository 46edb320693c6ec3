"""Tables of the benchmark page and of the README, as Markdown, by name.

Rows and cells are those each benchmark wrote into its JSON file; columns are named here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from common import Line, markdown_table
from page_figures import Figures, Record, figures, worker_counts

#: Columns of results whose tables always have the same ones.
COLUMNS = {
    "engine": ["miniray", "Ray", "ratio"],
    "train_pairs": ["`DDPTrainer`", "torchrun DDP", "ratio", "95 % interval"],
    "sync_interval": ["held-out loss", "accuracy", "moved", "to interval 1"],
    "ps": ["miniray", "other", "ratio"],
    "memory_table": ["one driver", "sharded, decoded at once", "miniray"],
    "doctor": ["figure"],
    "doctor_gpu": ["figure"],
    "parallel": ["miniray", "against", "ratio"],
    "bubble": ["measured", "by the formula", "difference"],
}


def tables(results: dict[str, Record]) -> dict[str, str]:
    """All tables that these results give."""
    found = {"machines": machines(results)}
    for name, columns in COLUMNS.items():
        if name in results:
            found[name] = _table(columns, results[name]["table"])
    for name, make in MAKERS.items():
        source = name.partition("-")[0]
        if source in results:
            found[name] = make(results[source])
    quoted = figures(results)
    found["readme"] = readme(quoted, "en")
    found["readme-zh"] = readme(quoted, "zh")
    found["peers"] = peers(quoted, results, "en")
    found["peers-zh"] = peers(quoted, results, "zh")
    return found


def _table(columns: list[str], rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        title = row["title"].strip()
        if row["title"].startswith("  "):
            title = f"– {title}"  # a further line about the row above it
        cells = [cell.replace("%", " %").replace("  %", " %") for cell in row["cells"]]
        goal = row["goal"].replace("%", " %").replace("  %", " %")
        lines.append(Line(title, cells, goal, row["reached"]))
    text = markdown_table(columns, lines)
    if any(line.goal for line in lines):
        return text
    # Nothing was wanted of any line: without that column.
    return "\n".join(line.rsplit("|", 2)[0] + "|" for line in text.splitlines())


def machines(results: dict[str, Record]) -> str:
    lines = ["| results | when | machine | versions |", "|---|---|---|---|"]
    for name, record in results.items():
        when = record.get("finished") or record.get("time") or record.get("when") or ""
        has = record["machine"]
        gpu = f", {has['gpu']}" if "gpu" in has else ""
        machine = f"{has['cores']} cores ({has['cpu']}), {has['memory_gib']:.0f} GiB{gpu}"
        versions = {
            "Python": has["python"],
            **record["versions"],
            **record.get("peer_versions", {}),
        }
        shown = ", ".join(f"{package} {version}" for package, version in versions.items())
        lines.append(f"| `{name}.json` | {when[:10]} | {machine} | {shown} |")
    return "\n".join(lines)


def start(record: Record) -> str:
    from start import COLUMNS

    return _table(COLUMNS, record["table"])


def train(record: Record) -> str:
    from train import PEERS

    names = [PEERS[name].title for name in record["samples"]]
    return _table([*names, "to the best"], record["table"])


def recovery(record: Record) -> str:
    from recovery import PEERS

    names = [PEERS[name].title for name in record["samples"]["recovery"]]
    return _table([*names, "miniray to the best"], record["table"])


def scaling(record: Record) -> str:
    counts = next(iter(worker_counts(record).values()))
    return _table([f"{n} worker{'s' * (n > 1)}" for n in counts], record["table"])


def gpu_sync(record: Record) -> str:
    found = figures({"gpu_sync": record})
    lines = ["| | a sync | moved | plain copies | of plain |", "|---|---:|---:|---:|---:|"]
    for result in record["results"]:
        workers = result["workers"]
        keys = ("sync", "moved", "plain", "of_plain")
        cells = [found[f"gpu_sync.{workers}.{key}"] for key in keys]
        lines.append(f"| {workers} workers | {' | '.join(cells)} |")
    return "\n".join(lines)


def data(record: Record) -> str:
    return _table(record["columns"], record["table"])


def data_targets(record: Record) -> str:
    return _table(record["target_columns"], record["targets"])


def rl(record: Record) -> str:
    from rl import SYSTEMS, summarise

    lines = summarise(record["training"])
    columns = [*(SYSTEMS[name].title for name in record["training"]), "miniray : TRL"]
    return _table(columns, [vars(line) for line in lines])


def rl_bytes(record: Record) -> str:
    from rl import summarise_bytes

    sizes = sorted({tuple(map(int, key.split("-")[1:])) for key in record["driver_bytes"]})
    lines = summarise_bytes(record["driver_bytes"], sizes)
    columns = ["workers own their data", "one controller", "ratio"]
    return _table(columns, [vars(line) for line in lines])


def geoguessr(record: Record) -> str:
    columns = [*(f"seed {seed}" for seed in record["runs"]), "median change"]
    return _table(columns, record["table"])


MAKERS: dict[str, Callable[[Record], str]] = {
    "start": start,
    "train": train,
    "recovery": recovery,
    "scaling": scaling,
    "gpu_sync": gpu_sync,
    "data": data,
    "data-targets": data_targets,
    "rl": rl,
    "rl-bytes": rl_bytes,
    "geoguessr": geoguessr,
}

#: Rows of the README's table: label in English and Chinese, our figure, peer, its figure, ratio.
README_ROWS: list[tuple[str, str, str, str, str, str]] = [
    ("CNN on 2 workers with `DDPTrainer`, whole command",
     "`DDPTrainer` 用 2 个 worker 训练 CNN，整条命令",
     "train.wall.ddp", "torchrun DDP", "train.wall.torchrun", "train.wall.ddp_over_torchrun"),
    ("the same, weights averaged once per epoch", "同上，每个 epoch 平均一次权重",
     "train.wall.miniray", "torchrun DDP", "train.wall.torchrun", "train.wall.over_torchrun"),
    ("a rank is killed: time until the next step", "一个 rank 被杀死：到下一步的时间",
     "recovery.seconds.miniray", "torchrun with checkpoints", "recovery.seconds.torchrun",
     "recovery.seconds.over_torchrun"),
    ("parameter sync of 100 MB on each of 4 workers", "4 个 worker 各 100 MB 的参数同步",
     "ps.4x10.miniray", "gloo all-reduce", "ps.4x10.gloo", "ps.4x10.over_gloo"),
    ("memory per machine for a batch of prompts with images", "一个带图提示 batch 所需的单机内存",
     "memory_table.node", "one driver", "memory_table.driver", "memory_table.less"),
    ("GRPO, tokens per second", "GRPO，每秒 token 数",
     "rl.rate.miniray-2", "TRL, 2 processes", "rl.rate.trl-2", "rl.rate.over_trl"),
    ("actor calls, synchronous", "actor 同步调用",
     "engine.call_sync.miniray", "Ray", "engine.call_sync.ray", "engine.call_sync.ratio"),
    ("import and start until the first result", "从 import 到首个结果",
     "engine.startup.miniray", "Ray", "engine.startup.ray", "engine.startup.ratio"),
    ("memory of an idle instance with 4 actors", "空闲实例的内存（4 个 actor）",
     "engine.memory.miniray", "Ray", "engine.memory.ray", "engine.memory.ratio"),
]  # fmt: skip

CHINESE = {
    "one driver": "单一控制进程",
    "torchrun with checkpoints": "torchrun 加检查点",
    "TRL, 2 processes": "TRL，2 个进程",
}
HEADS = {
    "en": "| | miniray | peer | | ratio |\n|---|---:|---|---:|---:|",
    "zh": "| | miniray | 对比对象 | | 倍数 |\n|---|---:|---|---:|---:|",
}


def readme(quoted: Figures, language: str) -> str:
    """Return the README's table: the rows that have results."""
    lines = [HEADS[language]]
    for english, chinese, ours, peer, theirs, ratio in README_ROWS:
        if {ours, theirs, ratio} <= quoted.keys():
            title, name = english, peer
            if language == "zh":
                title, name = chinese, CHINESE.get(peer, peer)
            better = float(quoted[ratio].rstrip("×").replace(",", "")) >= 1
            shown = f"**{quoted[ratio]}**" if better else quoted[ratio]
            cells = [title, quoted[ours], name, quoted[theirs], shown]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


#: Columns of the comparison with peers: title, and the names in the files of ``PEER_FILES``.
PEER_FILES = ("train", "recovery", "data")
PEER_COLUMNS = [
    ("miniray", "ddp", "miniray", "miniray_data"),
    ("torchrun", "torchrun", "torchrun", None),
    ("Ray Train / Data", "ray", "ray", "ray_data"),
    ("Lightning", "lightning", "lightning", None),
    ("Accelerate", "accelerate", None, None),
    ("Mosaic Streaming", None, None, "mosaic"),
    ("verl", None, None, "verl_ranks"),
]
#: Rows of the comparison: label in English and Chinese, file and figure.
PEER_ROWS = [
    ("CNN on 2 workers: whole command", "2 个 worker 训练 CNN：整条命令", "train", "wall"),
    ("– until the first step", "– 到第一步的时间", "train", "first_step"),
    ("– memory of all processes", "– 全部进程的内存", "train", "memory"),
    ("– lines in the script", "– 脚本行数", "train", "lines"),
    ("A rank is killed: steps lost, mean", "一个 rank 被杀死：平均丢失的步数", "recovery", "lost"),
    ("– time until the next step", "– 到下一步的时间", "recovery", "seconds"),
    (
        "Parquet from Hugging Face datasets, 4 ranks: rows per epoch",
        "4 个 rank 读 Hugging Face datasets 写的 Parquet：每个 epoch 的行",
        "data",
        "epoch",
    ),
    ("– until the first batch", "– 到第一个 batch 的时间", "data", "first_batch"),
    ("– memory of a rank", "– 每个 rank 的内存", "data", "anonymous_mb"),
    ("– stopped halfway and resumed", "– 中途停止后恢复", "data", "resume_union"),
]


def peers(quoted: Figures, results: dict[str, Record], language: str) -> str:
    """Return the comparison with peers. It has only measured figures."""
    found = dict(quoted)
    for name, of in results.get("data", {}).get("samples", {}).items():
        for key in ("epoch", "resume_union"):
            if of.get(key):
                found[f"data.{key}.{name}"] = "; ".join(sorted(set(of[key])))
        if not of.get("resume_union"):
            found[f"data.resume_union.{name}"] = "no state"
    columns = []
    for title, *names in PEER_COLUMNS:
        of_file = dict(zip(PEER_FILES, names, strict=True))
        cells = [found.get(f"{file}.{key}.{of_file[file]}") for _, _, file, key in PEER_ROWS]
        columns.append((title, cells))
    columns = [(title, cells) for title, cells in columns if any(cells)]
    source = "benchmark" if language == "en" else "基准测试"
    lines = [
        f"| | {' | '.join(title for title, _ in columns)} | {source} |",
        f"|---|{'---:|' * len(columns)}---|",
    ]
    for number, (english, chinese, file, _) in enumerate(PEER_ROWS):
        cells = [of[number] or "–" for _, of in columns]
        if any(cell != "–" for cell in cells):
            words = english if language == "en" else chinese
            shown = " | ".join(cell if language == "en" else _chinese(cell) for cell in cells)
            lines.append(f"| {words} | {shown} | `benchmarks/{file}.py` |")
    return "\n".join(lines)


def _chinese(words: str) -> str:
    for english, chinese in (
        ("exactly once", "恰好一次"), ("no state", "无状态"), (" missing", " 行缺失"),
        (" twice", " 行重复"),
    ):  # fmt: skip
        words = words.replace(english, chinese)
    return words
