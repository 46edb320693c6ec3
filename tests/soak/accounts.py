"""What the ledger of a soaked run must add up to."""

import collections
import json
import statistics


def read(folder):
    """The rounds that count, in order, with the rows of each: up to the last checkpoint."""
    checkpoints = sorted((folder / "run" / "checkpoints").glob("epoch-*"))
    if not checkpoints:
        return []
    last = int(checkpoints[-1].name.removeprefix("epoch-"))
    rounds = []
    for number in range(last + 1):
        record = json.loads((folder / "rounds" / f"{number:06d}.json").read_text())
        delivered = []
        for call in record["calls"]:
            entry = json.loads((folder / "calls" / f"{number:06d}-{call}.json").read_text())
            delivered.append((entry["pass"], entry["rows"]))
        rounds.append({**record, "delivered": delivered})
    return rounds


def check(rounds, total):
    """(figures, what is wrong) of rounds over data of ``total`` rows."""
    passes = collections.defaultdict(collections.Counter)
    for record in rounds:
        for number, rows in record["delivered"]:
            passes[number].update(rows)
    wrong = []
    for number, counts in sorted(passes.items()):
        twice = sorted(row for row, count in counts.items() if count > 1)
        missing = total - len(counts)
        if twice:
            wrong.append(f"pass {number}: {len(twice)} rows more than once, as row {twice[0]}")
        if missing and number < max(passes):  # the last one is under way
            wrong.append(f"pass {number}: {missing} rows never")
    if passes and sorted(passes) != list(range(max(passes) + 1)):
        wrong.append(f"passes {sorted(passes)} are not all there are")
    # What a worker learned is lost with it if it dies between its result and the sync. A survivor
    # stands in for it; where there is none, the whole round may be.
    before, lost = 0.0, 0
    for number, record in enumerate(rounds):
        more = round(record["rounds"] - before, 6)
        spared = set(record["calls"]) <= set(record["lost"])
        if more != 1 and not (spared and more == 0):
            wrong.append(f"round {number}: {more:g} rounds more are in the weights, not 1")
        before, lost = record["rounds"], lost + (more == 0)
    tenth = max(1, len(rounds) // 10)
    losses = [record["loss"] for record in rounds]
    figures = {
        "rounds": len(rounds),
        "passes": max(passes, default=0),
        "rows": sum(sum(counts.values()) for counts in passes.values()),
        "rounds_nobody_survived": lost,
        "workers": sorted({record["workers"] for record in rounds}),
        "first_loss": statistics.median(losses[:tenth]) if losses else None,
        "last_loss": statistics.median(losses[-tenth:]) if losses else None,
    }
    return figures, wrong
