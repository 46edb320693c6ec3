"""A diagnosis made on the spot and kept beside the run: ``doctor.txt`` and ``doctor.json``."""

from __future__ import annotations

import json
from pathlib import Path

from miniray.doctor import runfile


def save_diagnosis(run_dir: Path, hang_timeout: float | None = None) -> str:
    """Diagnose the run as it is now, keep the result, and return its text.

    Whatever goes wrong in here is said in the text: whoever asks has ranks to end or an error to
    raise, and must come to that.
    """
    from miniray.doctor.diagnose import diagnose

    try:
        diagnosis = diagnose(run_dir, hang_timeout=hang_timeout)
        text = diagnosis.text().rstrip()
        as_json = json.dumps(diagnosis.to_json(), indent=2, ensure_ascii=False)
        runfile.replace_text(run_dir / "doctor.txt", text + "\n")
        runfile.replace_text(run_dir / "doctor.json", as_json + "\n")
    except Exception as error:
        return f"the diagnosis itself failed: {type(error).__name__}: {error}"
    return text
