"""Every figure a page may quote, by name, made from the samples in ``benchmarks/results/*.json``.

``python benchmarks/page.py --list`` prints them all. A name begins with the name of its file:
``engine.call_sync.ratio`` comes from ``engine.json``. A file that is not there gives no figures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
from common import human, median

Record = dict[str, Any]
Figures = dict[str, str]


def load(folder: Path = common.RESULTS) -> dict[str, Record]:
    """The results by name of their file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def figures(results: dict[str, Record]) -> Figures:
    """All figures of all results, ready to be printed."""
    found: Figures = {}
    for name, make in MAKERS.items():
        if name in results:
            found |= {f"{name}.{key}": text for key, text in make(results[name]).items()}
    return found


def times(ratio: float) -> str:
    """A factor, with as many digits as say something."""
    return f"{ratio:,.0f}×" if ratio >= 30 else f"{ratio:.1f}×" if ratio >= 3 else f"{ratio:.2f}×"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def ratio_of(mine: float, theirs: float, more_is_better: bool) -> float:
    """How many times better mine is."""
    return mine / theirs if more_is_better else theirs / mine


def engine(record: Record) -> Figures:
    from engine import ROWS, SHARES

    found: Figures = {}
    samples = record["samples"]
    for key, row in ROWS.items():
        if not all(need in of for of in samples.values() for need in row.needs):
            continue
        values = {api: median(of[row.needs[0]]) for api, of in samples.items()}
        found |= {f"{key}.{api}": human(value, row.unit) for api, value in values.items()}
        if "ray" in values:
            ratio = ratio_of(values["miniray"], values["ray"], row.unit.endswith("/s"))
            found[f"{key}.ratio"] = times(ratio)
        if key in SHARES:
            for api, of in samples.items():
                found[f"{key}.slowest.{api}"] = percent(min(of[key]) / median(of["memcpy"]))
    return found


def start(record: Record) -> Figures:
    return {
        re.sub(r"\W+", "_", name): human(median(of["wall"]), "s")
        for name, of in record["samples"].items()
    }


def train(record: Record) -> Figures:
    from train import METRICS

    found: Figures = {}
    samples = record["samples"]
    for key, _, unit, more, _ in METRICS:
        values = {name: median(of[key]) for name, of in samples.items() if key in of}
        for name, value in values.items():
            found[f"{key}.{name}"] = human(value, unit).strip()
            for ours, prefix in (("miniray", ""), ("ddp", "ddp_")):
                if name not in ("miniray", "ddp") and ours in values:
                    better = ratio_of(values[ours], value, more)
                    found[f"{key}.{prefix}over_{name}"] = times(better)
    return found


def train_pairs(record: Record) -> Figures:
    ratio = record["samples"]["ratio"]
    return {
        "ratio": f"{ratio['median'][0]:.3f}",
        "interval": " to ".join(f"{end:.3f}" for end in ratio["interval"]),
        "pairs": str(len(ratio["pairs"])),
    }


def recovery(record: Record) -> Figures:
    from recovery import PEERS, summarize_overhead

    found: Figures = {}
    samples = record["samples"]
    kills = samples["recovery"]
    for name, costs in kills.items():
        if costs["seconds"]:
            found[f"lost.{name}"] = f"{sum(costs['lost']) / len(costs['lost']):.1f}"
            found[f"seconds.{name}"] = human(median(costs["seconds"]), "s")
        found[f"recovered.{name}"] = f"{costs['failed'].count(0)} of {len(costs['failed'])}"
        if samples["overhead"][name]:
            overhead, *interval = summarize_overhead(samples["overhead"][name])
            found[f"overhead.{name}"] = f"{100 * overhead:.2f} %"
            found[f"interval.{name}"] = " to ".join(f"{100 * end:.2f} %" for end in interval)
        if costs.get("alone"):
            found[f"alone.{name}"] = f"{median(costs['alone']):.0f}"
        if name != "miniray" and costs["seconds"] and kills.get("miniray", {}).get("seconds"):
            ratio = median(costs["seconds"]) / median(kills["miniray"]["seconds"])
            found[f"seconds.over_{name}"] = times(ratio)
    restarting = [n for n, of in kills.items() if of["lost"] and not PEERS[n].survives]
    found["kills"] = str(max(len(kills[name]["failed"]) for name in restarting))
    return found


def scaling(record: Record) -> Figures:
    found: Figures = {}
    for system, counts in worker_counts(record).items():
        rates = [median(record["samples"][f"{system}-{n}"]["rate_whole"]) for n in counts]
        for count, rate in zip(counts, rates, strict=True):
            gain = rate / rates[0]
            found[f"{system}.{count}.rate"] = f"{rate:,.0f} samples/s"
            found[f"{system}.{count}.speedup"] = f"{gain:.2f}×"
            found[f"{system}.{count}.efficiency"] = percent(gain * counts[0] / count)
    return found


def worker_counts(record: Record) -> dict[str, list[int]]:
    """The numbers of workers each system ran with."""
    found: dict[str, list[int]] = {}
    for key in record["samples"]:
        system, _, count = key.rpartition("-")
        found.setdefault(system, []).append(int(count))
    return {system: sorted(counts) for system, counts in found.items()}


def sync_interval(record: Record) -> Figures:
    found: Figures = {"epochs": str(record["epochs"])}
    ends = interval_ends(record)
    first = next(iter(ends.values()))["bytes"]
    for title, end in ends.items():
        key = title.replace("sync_interval=", "every_").replace(", ", ".").replace(" ", "_")
        found[f"{key}.loss"] = f"{end['loss']:.3f}"
        found[f"{key}.accuracy"] = percent(end["accuracy"])
        found[f"{key}.bytes"] = f"{end['bytes'] / 1e6:,.0f} MB"
        found[f"{key}.over_interval_1"] = times(end["bytes"] / first)
    return found


def interval_ends(record: Record) -> dict[str, dict[str, float]]:
    """Where each case ended: medians over seeds."""
    return {
        title: {key: median([curve[-1][key] for curve in runs]) for key in runs[0][-1]}
        for title, runs in record["curves"].items()
    }


def gpu_sync(record: Record) -> Figures:
    found: Figures = {"megabytes": f"{record['megabytes']:,} MB", "tensors": str(record["tensors"])}
    for result in record["results"]:
        workers, seconds = result["workers"], median(result["seconds"])
        moved = 2 * workers * record["megabytes"] / 1000
        plain = workers * sum(result["copies"].values())
        found[f"{workers}.sync"] = human(seconds, "s")
        found[f"{workers}.moved"] = f"{moved / seconds:.1f} GB/s"
        found[f"{workers}.plain"] = f"{moved / plain:.1f} GB/s"
        found[f"{workers}.of_plain"] = percent(plain / seconds)
    return found


def ps(record: Record) -> Figures:
    found: Figures = {}
    for case, samples in record["samples"].items():
        key = case.replace(" workers, ", "x").replace(" tensors", "")
        mine = median(samples["miniray"]["sync"])
        found[f"{key}.miniray"] = human(mine, "s")
        found[f"{key}.memory"] = f"{max(samples['miniray']['server_memory']):.2f}×"
        for other, way in (("gloo", "sync"), ("ray", "sync"), ("ray", "arrays")):
            if way in samples.get(other, {}):
                theirs = median(samples[other][way])
                name = other if way == "sync" else f"{other}_{way}"
                found[f"{key}.{name}"] = human(theirs, "s")
                found[f"{key}.over_{name}"] = times(theirs / mine)
    return found


def data(record: Record) -> Figures:
    units = {"first_batch": "s", "raw": "rows/s", "decoded": "rows/s", "resume": "s"}
    units |= {"uss": "MB", "anonymous_mb": "MB"}
    found: Figures = {"rows": f"{record['rows']:,}"}
    samples = record["samples"]
    others = {n: of for n, of in samples.items() if n not in ("miniray_data", "bare_decode")}
    for key, unit in units.items():
        for name, of in samples.items():
            if of.get(key):
                found[f"{key}.{name}"] = human(median(of[key]), unit)
        more = unit == "rows/s"
        theirs = [median(of[key]) for of in others.values() if of.get(key)]
        if theirs and samples.get("miniray_data", {}).get(key):
            best = max(theirs) if more else min(theirs)
            mine = median(samples["miniray_data"][key])
            found[f"{key}.best_other"] = human(best, unit)
            found[f"{key}.over_best_other"] = times(ratio_of(mine, best, more))
    return found


def memory_table(record: Record) -> Figures:
    bytes_of = memory_bytes(record)
    return {
        "batch": f"{record['batch']:,}",
        "workers": str(record["workers"]),
        "driver": size(bytes_of["driver"]),
        "sharded_node": size(bytes_of["sharded_node"]),
        "node": size(bytes_of["node"]),
        "worker": size(max(record["worker_mb"]) * 1e6),
        "less": times(bytes_of["driver"] / bytes_of["node"]),
        "sent": size(bytes_of["sent"]),
        "row_in_file": size(record["encoded_row"]),
        "row_processed": size(record["processed_row"]),
    }


def memory_bytes(record: Record) -> dict[str, float]:
    """Memory of one machine in the three ways of feeding the workers, and what one driver sends."""
    whole = record["batch"] * record["processed_row"]
    per_node, workers = record["per_node"], record["workers"]
    nodes = [sum(record["worker_mb"][i : i + per_node]) for i in range(0, workers, per_node)]
    driver = record["driver_batches"] * whole
    return {
        "driver": driver,
        "sharded_node": driver / workers * per_node,
        "node": max(nodes) * 1e6,
        "sent": record["sent_ratio"] * whole,
    }


def size(amount: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if amount >= unit:
            return f"{amount / unit:.3g} {name}"
    return f"{amount:.0f} B"


def doctor(record: Record) -> Figures:
    from doctor import STEP_SECONDS, extra_seconds

    extra = extra_seconds(record["steps_s"], record["updates_ns"])
    found = {
        "step_extra": human(max(extra, 0.0), "s"),
        "step_percent": f"{100 * extra / STEP_SECONDS:.2f} %",
    }
    for name, samples in record["updates_ns"].items():
        found[f"update.{name.replace(',', '').replace(' ', '_')}"] = nanoseconds(min(samples))
    return found


def doctor_gpu(record: Record) -> Figures:
    """What the table of its results says, by the title of the line."""
    return {
        line["title"].replace(",", "").replace(" ", "_"): line["cells"][0]
        for line in record["table"]
    }


def nanoseconds(value: float) -> str:
    return f"{value:.0f} ns" if value < 1000 else human(value / 1e9, "s")


def parallel(record: Record) -> Figures:
    """Of overhead and memory, those that were measured."""
    found: Figures = {}
    samples = record["samples"]
    if "overhead" in samples:
        steps, by_hand = samples["overhead"]["step"], samples["overhead"]["hand"]
        ratio = median([mine / hand for mine, hand in zip(steps, by_hand, strict=True)])
        found["overhead"] = f"{ratio:.3f}×"
    if "memory" in samples:
        memory, width = samples["memory"], samples["width"]

        def own(kind: str, workers: int) -> float:
            large, small = (memory[f"{kind}, {workers}, {n}"][0] for n in (width, 8))
            return float(large - small)

        for kind in ("layers", "tensor"):
            found[f"memory.{kind}"] = f"{own(kind, 2) / own('layers', 1):.2f}×"
    return found


def bubble(record: Record) -> Figures:
    found: Figures = {}
    for name, of in record["samples"]["bubble"].items():
        key = name.replace(", ", ".").replace("=", "")
        found[key] = f"{100 * median(of['bubble']):.1f} %"
        found[f"{key}.formula"] = f"{100 * of['formula'][0]:.1f} %"
    return found


def rl(record: Record) -> Figures:
    from rl import METRICS, SYSTEMS

    found: Figures = {}
    for key, _, unit, more in METRICS:
        values = {n: median(of[key]) for n, of in record["training"].items() if key in of}
        found |= {f"{key}.{n}": human(v, unit).strip() for n, v in values.items()}
        mine = [v for n, v in values.items() if not SYSTEMS[n].is_peer]
        theirs = [v for n, v in values.items() if SYSTEMS[n].is_peer]
        if mine and theirs:
            best = max if more else min
            found[f"{key}.over_trl"] = times(ratio_of(best(mine), best(theirs), more))
    for key, of in record["driver_bytes"].items():
        found[f"driver_bytes.{key.replace('-', '.')}"] = size(median(of["bytes"]))
    return found


def geoguessr(record: Record) -> Figures:
    """Before GRPO, after it: medians over seeds, of held-out pictures."""
    found: Figures = {"steps": str(record["steps"]), "seeds": str(len(record["runs"]))}
    sampled = [run["reward"] for run in record["runs"].values()]
    likeliest = [list(run["likeliest"].values()) for run in record["runs"].values()]
    for number, when in ((0, "before"), (-1, "after")):
        found[f"sampled_reward.{when}"] = f"{median([rewards[number] for rewards in sampled]):.3f}"
    for number, when in ((-2, "before"), (-1, "after")):
        states = [states[number] for states in likeliest]
        found[f"reward.{when}"] = f"{median([state['reward'] for state in states]):.3f}"
        for key in ("acc@200km", "acc@750km", "acc@2500km"):
            name = key.partition("@")[2]
            found[f"within_{name}.{when}"] = percent(median([state[key] for state in states]))
    return found


def geoguessr_gpu(record: Record) -> Figures:
    """The large policy on a GPU: what it is, how fast a step is and of what, what it learnt."""
    speed, settings = record["speed"], record["settings"]
    return {
        "parameters": f"{record['parameters'] / 1e6:.0f} M",
        "warm_up": str(settings["warm_up"]),
        "steps": str(settings["steps"]),
        "tokens": f"{speed['tokens_per_second']:,.0f}",
        "step": human(speed["step_seconds"], "s").strip(),
        "memory": f"{speed['gpu_gb']:.1f} GB",
        "reward.before": f"{record['reward'][0]:.3f}",
        "reward.after": f"{record['reward'][-1]:.3f}",
        **{
            f"share.{name.replace(' ', '_')}": f"{100 * share:.1f} %"
            for name, share in speed["shares"].items()
        },
    }


MAKERS: dict[str, Callable[[Record], Figures]] = {
    "engine": engine,
    "start": start,
    "train": train,
    "train_pairs": train_pairs,
    "recovery": recovery,
    "scaling": scaling,
    "sync_interval": sync_interval,
    "gpu_sync": gpu_sync,
    "ps": ps,
    "data": data,
    "memory_table": memory_table,
    "doctor": doctor,
    "doctor_gpu": doctor_gpu,
    "parallel": parallel,
    "bubble": bubble,
    "rl": rl,
    "geoguessr": geoguessr,
    "geoguessr_gpu": geoguessr_gpu,
}
