"""``miniray data``: describe and rewrite data files, and manage the row cache."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import click

from miniray.cli import Group
from miniray.cli.targets import json_option

EPILOG = """\b
Examples:
  miniray data inspect train/          show the cost of reading the files
  miniray data repack train/ packed/   rewrite files with row groups of 8 MB
  miniray data cache                   list the copies in the row cache
  miniray data cache --clear           delete the copies that aren't in use
"""
_MAX_FILES = 20


@click.group(cls=Group, epilog=EPILOG)
def data() -> None:
    """Inspect and repack Parquet files, and manage the row cache."""


@data.command(epilog=EPILOG, short_help="Show the cost of reading Parquet files.")
@click.argument("files", nargs=-1, required=True)
@click.option("--column", "columns", multiple=True, help="Column to read. Defaults to all columns.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Number of ranks.")
@json_option
def inspect(files: tuple[str, ...], columns: tuple[str, ...], ranks: int, as_json: bool) -> None:
    """Show row groups, sizes and the cost of each shuffle mode, and suggest improvements."""
    from miniray.data.tools.inspection import inspect_files

    report = inspect_files(list(files), list(columns) or None, ranks)
    if as_json:
        click.echo(json.dumps(dataclasses.asdict(report)))
        return
    for file in report.files[:_MAX_FILES]:
        click.echo(
            f"{file.path}\n  {file.rows:,} rows in {file.row_groups:,} row groups,"
            f" {_format_mb(file.encoded_bytes)} encoded, about {_format_mb(file.decoded_bytes)}"
            f" decoded (largest row group {_format_mb(file.largest_row_group_bytes)})\n"
            f"  compression {file.compression}, written by {file.writer}"
        )
    if len(report.files) > _MAX_FILES:
        click.echo(f"… and {len(report.files) - _MAX_FILES} more files")
    click.echo(f"\n{'shuffle=':<10} {'memory per rank':>16} {'read per rank':>14} {'cache':>10}")
    for order in report.orders:
        cached = " (exists)" if order.cache_bytes and report.is_cached else ""
        click.echo(
            f"{order.order:<10} {_format_mb(order.memory_bytes):>16}"
            f" {_format_mb(order.read_bytes):>14} {_format_mb(order.cache_bytes):>10}{cached}"
        )
    for advice in report.advice:
        click.echo(f"\n{advice}")


@data.command(epilog=EPILOG, short_help="Rewrite Parquet files with row groups of 8 MB.")
@click.argument("files", nargs=-1, required=True)
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--file-size", default="512MB", help="Decoded bytes per file. Defaults to 512MB.")
def repack(files: tuple[str, ...], output: Path, file_size: str) -> None:
    """Rewrite FILES with row groups of about 8 MB, and store the new files in OUTPUT.

    The order of the rows and the schema are preserved. Small files are merged.
    """
    from miniray.data.tools.repack import repack_files

    written = repack_files(list(files), output, file_size)
    size = sum(path.stat().st_size for path in written)
    click.echo(f"Wrote {len(written)} files with {_format_mb(size)} to {output}")


@data.command(epilog=EPILOG, short_help="List or delete the copies in the row cache.")
@click.option("--clear", is_flag=True, help="Delete the copies that no process uses.")
@click.option("--dir", "directory", type=click.Path(path_type=Path), help="Directory of the cache.")
@json_option
def cache(clear: bool, directory: Path | None, as_json: bool) -> None:
    """List the copies in the row cache, or delete the copies that aren't in use."""
    from miniray.data import RowCache

    rows = RowCache(directory)
    entries = rows.clear() if clear else rows.list_entries()
    if as_json:
        shown = [{**entry._asdict(), "path": str(entry.path)} for entry in entries]
        click.echo(json.dumps(shown))
        return
    for entry in entries:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        state = "in use" if entry.is_in_use and not clear else f"last used {used}"
        click.echo(f"{entry.path}  {_format_mb(entry.nbytes)}  {state}")
    total = _format_mb(sum(entry.nbytes for entry in entries))
    verb = "Deleted" if clear else "Found"
    click.echo(f"{verb} {len(entries)} copies with {total} in {rows.directory}")


def _format_mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB" if nbytes >= 10**7 else f"{nbytes / 1e6:.1f} MB"
