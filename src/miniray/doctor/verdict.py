"""A diagnosis made on the spot and kept beside the run: ``doctor.txt`` and ``doctor.json``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from miniray.doctor import runfile


@dataclasses.dataclass(frozen=True)
class Judgement:
    """A diagnosis as its text, and as JSON where it could be made at all."""

    text: str
    verdict: str  #: its first line
    stuck: bool  #: the run will not go on by itself, or nobody can tell
    healthy: bool = False  #: nothing was found
    json: str = ""

    def keep(self, run_dir: Path) -> str:
        """Write it beside the run; "" or why that could not be done (a full disk, say)."""
        try:
            runfile.replace_text(run_dir / "doctor.txt", self.text + "\n")
            if self.json:
                runfile.replace_text(run_dir / "doctor.json", self.json + "\n")
        except OSError as error:
            return f"the diagnosis could not be written: {error}"
        return ""


def judge(run_dir: Path, hang_timeout: float | None = None) -> Judgement:
    """Diagnose the run as it is now.

    Whatever goes wrong in here is said in the text: whoever asks has ranks to end or an error to
    raise, and must come to that.
    """
    from miniray.doctor.diagnose import diagnose

    try:
        diagnosis = diagnose(run_dir, hang_timeout=hang_timeout)
        ends = any(finding.severity.ends_run for finding in diagnosis.findings)
        return Judgement(
            text=diagnosis.text().rstrip(),
            verdict=diagnosis.verdict,
            stuck=ends or not diagnosis.readable,
            healthy=diagnosis.exit_code == 0,
            json=json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=False),
        )
    except Exception as error:
        said = f"the diagnosis itself failed: {type(error).__name__}: {error}"
        return Judgement(said, said, stuck=True)


def save_diagnosis(run_dir: Path, hang_timeout: float | None = None) -> str:
    """``judge``, keep the result, and return its text."""
    judgement = judge(run_dir, hang_timeout)
    problem = judgement.keep(run_dir)
    return f"{judgement.text}\n\n{problem}" if problem else judgement.text
