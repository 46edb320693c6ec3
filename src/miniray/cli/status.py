"""``miniray status``: show installed packages, hardware and available engines."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
import subprocess
import sys
from typing import Any

import click

from miniray import limits
from miniray.cli.targets import json_option
from miniray.cli.terminal import console
from miniray.core import machine

#: Packages to show. The required packages come first.
PACKAGES = ("numpy", "cloudpickle", "psutil", "torch", "pyarrow", "ray")
RAY_MINIMUM = (2, 40)

EPILOG = """\b
Examples:
  miniray status
  miniray status --json | python -m json.tool
"""


@click.command(epilog=EPILOG)
@json_option
def status(as_json: bool) -> None:
    """Show the installed versions, the hardware and the available engines.

    The command imports neither torch nor Ray. The only process that the command starts is
    nvidia-smi.
    """
    found = collect()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        _show(found)


def collect() -> dict[str, Any]:
    """Return all values that the ``status`` command shows."""
    from miniray import __version__

    return {
        "miniray": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "cpus": limits.cpu_count(),
        "memory_bytes": limits.memory_total(),
        "memory_available_bytes": limits.memory_available(),
        "gpus": gpus(),
        "backends": backends(),
    }


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that the engine can assign to actors and tasks.

    The name and the memory of each GPU come from nvidia-smi.
    """
    known = _query_nvidia_smi()
    unknown: dict[str, Any] = {"name": None, "memory_bytes": None}
    return [{"id": gpu, **known.get(gpu, unknown)} for gpu in machine.gpu_ids()]


def _query_nvidia_smi() -> dict[str, dict[str, Any]]:
    """Return a dict that maps the index and the UUID of each GPU to its name and memory.

    Return {} if nvidia-smi isn't installed or fails.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = [tool, "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    known = {}
    for line in answer.stdout.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 4 and fields[3].isdigit():
            index, uuid, name, mebibytes = fields
            known[index] = known[uuid] = {"name": name, "memory_bytes": int(mebibytes) << 20}
    return known


def backends() -> list[dict[str, Any]]:
    """Return all engines.

    The field ``reason`` describes the engine, or explains why it isn't available.
    """
    unix = sys.platform != "win32"
    local = "processes and shared memory; the default" if unix else "needs Linux or macOS"
    return [
        {"name": "inline", "available": True, "reason": "this process; for debugging"},
        {"name": "local", "available": unix, "reason": local},
        {"name": "ray", **_ray()},
    ]


def _ray() -> dict[str, Any]:
    version = _version("ray")
    if version is None:
        return {"available": False, "reason": "Ray is not installed: pip install 'miniray[ray]'"}
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < RAY_MINIMUM:
        minimum = ".".join(map(str, RAY_MINIMUM))
        return {"available": False, "reason": f"Ray {version} is older than {minimum}"}
    return {"available": True, "reason": f"Ray {version}"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(found: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    packages = ", ".join(f"{k} {v}" for k, v in found["packages"].items() if v)
    missing = ", ".join(k for k, v in found["packages"].items() if not v)
    free, total = found["memory_available_bytes"], found["memory_bytes"]
    facts = {
        "miniray": f"{found['miniray']} on Python {found['python']}",
        "platform": found["platform"],
        "packages": packages,
        "not installed": missing,
        "cores": found["cpus"],
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} GiB available",
        "GPUs": "\n".join(map(_format_gpu, found["gpus"])) or "none",
    }
    shown = Table.grid(padding=(0, 2, 0, 0))
    for name, value in facts.items():
        if value:
            shown.add_row(name, Text(str(value)))
    engines = Table("engine", "available", "notes")
    for backend in found["backends"]:
        mark = "[green]yes[/]" if backend["available"] else "[red]no[/]"
        engines.add_row(backend["name"], mark, Text(backend["reason"]))
    console().print(shown, "", engines, sep="\n")


def _format_gpu(gpu: dict[str, Any]) -> str:
    if gpu["name"] is None:
        return str(gpu["id"])
    return f"{gpu['id']}: {gpu['name']}, {gpu['memory_bytes'] / 2**30:.0f} GiB"
