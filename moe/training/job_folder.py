"""A job: several runs in one folder, one after the other, with one set of settings."""

import json
from pathlib import Path

from moe.checks import shown
from moe.errors import DataError
from moe.files import claim_folder, write_text
from moe.parsing import read_record

JOB = "job"


def keep_settings(folder: Path, settings: dict[str, str], *, resume: bool, has_begun: bool) -> None:
    """Writes the settings of a new job, or checks that a resumed one has the same.

    Args:
        folder: Folder of the job, claimed by `claim_folder`.
        settings: Settings by name.
        resume: Whether the user gave --resume.
        has_begun: Whether the first stage is finished. Until then other settings replace the earlier ones, since they
            may have caused its failure.

    Raises:
        DataError: When the folder holds a job, and it is not resumed, has other settings, or
            settings.json is damaged.
    """
    path = folder / "settings.json"
    if not path.exists() or not has_begun:
        write_text(path, json.dumps(settings))
        return

    # A job resumes with the same settings.
    restore = f"Restore it, or remove {folder} to begin anew."
    before = read_record(path, dict[str, str], advice=restore)
    advice = "Give --resume and the same settings, or another --out."
    changed = []
    for name, value in settings.items():
        if before.get(name) != value:
            changed.append(f"{name} is {shown(value)}, was {shown(before.get(name))}")
    if changed:
        raise DataError(f"{folder} holds a run with other settings: {'; '.join(changed)}. {advice}")
    if not resume:
        raise DataError(f"{folder} holds a run already. {advice}")


def claim_job(folder: Path) -> None:
    """Makes and marks the folder of several runs, each of which has its own folder.

    Raises:
        DataError: When the folder holds something else.
    """
    in_use = f"Another job begins in {folder}. Wait for it, or choose another --out."
    with claim_folder(folder, JOB, in_use=in_use):
        pass
