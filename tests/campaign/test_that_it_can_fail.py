"""Each defect that a campaign looks for, put into a worker: it is found, and said so that one can begin to look for it."""

import os
from pathlib import Path
from unittest import mock

import pytest

from tests.campaign import bugs
from tests.campaign.bugs import BUG
from tests.torture.campaign import crew, processes, referee
from tests.torture.campaign.command import run_campaign
from tests.torture.campaign.processes import NurseryFailed
from tests.torture.campaign.report import Report

SECONDS = 60.0
"""A campaign ends with the round in which something is found."""


def found(directory: Path, bug: str, kind: str, seconds: float = SECONDS) -> tuple[Report, str]:
    """A campaign of workers with that bug, and its first finding of that kind."""
    with mock.patch.dict(os.environ, {BUG: bug}):
        report = run_campaign(directory, seconds / 60, 1, ("disk",), worker=bugs.__name__)
    assert report.findings.counts[kind], "\n".join(report.lines())
    assert report.failed
    assert report.directory.is_dir(), "what was found is kept"
    return report, next(line for line in report.findings.sentences if line.startswith(kind))


@pytest.mark.parametrize(
    ("bug", "kind", "words"),
    [
        ("flips_bits", "wrong bytes", ["disk-", "chunk ", "1 of ", "expected ", "found "]),
        ("trusts_payloads", "wrong bytes", ["1 of ", "a byte of its file was flipped"]),
        ("loses_chunks", "lost", ["promised"]),
        ("keeps_forgotten", "not forgotten", ["forgotten"]),
        ("crashes", "process broke", ["ended by itself", "SIGABRT", "in crashes"]),
        ("complains", "process broke", ["nursery.log", "a destructor failed"]),
        ("drops_an_error", "process broke", ["never retrieved", "RuntimeError: nobody waits for this"]),
        ("raises_at_the_end", "process broke", ["was to end", "status 70", "RuntimeError: the last close fails"]),
        ("crashes_at_the_end", "process broke", ["was to end", "SIGSEGV", "in crashes_at_the_end"]),
    ],
)
def test_defect_is_found_and_its_finding_says_so(tmp_path: Path, bug: str, kind: str, words: list[str]) -> None:
    _, said = found(tmp_path, bug, kind)
    assert [word for word in words if word not in said] == [], said


def test_cap_that_is_exceeded_is_found(tmp_path: Path) -> None:
    report, said = found(tmp_path, "takes_too_much", "cap exceeded")
    most, cap = report.occupied["disk"]
    assert most > 1.2 * cap
    assert str(cap) in said


def test_part_in_which_the_files_were_never_counted_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "STOP_S", 0.0)
    monkeypatch.setattr(processes, "stands_still", lambda pid: False)
    report, said = found(tmp_path, "", "not audited", 5.0)
    assert said.startswith("not audited: disk: "), said
    skipped = sum(report.audits_skipped.values())
    assert skipped and f"         0  audits of what the files occupy, {skipped} skipped" in "\n".join(report.lines())


def test_leak_of_memory_and_descriptors_is_found(tmp_path: Path) -> None:
    report, _ = found(tmp_path, "leaks", "leak", 30.0)
    said = " ".join(report.findings.sentences)
    assert "descriptors: " in said or "MiB more than " in said


def test_process_that_hangs_is_found_and_its_stacks_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "SILENCE_S", 1.5)
    monkeypatch.setattr(crew, "ANSWER_S", 2.0)
    monkeypatch.setattr(referee, "RECOVERY_S", 2.0)
    report, _ = found(tmp_path, "hangs", "process hangs")
    log = "".join(path.read_text() for path in report.directory.glob("disk*.log"))
    assert "in hangs" in log


def test_worker_that_cannot_start_ends_the_campaign_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NurseryFailed, match="No module named 'tests.campaign.nobody'"):
        run_campaign(tmp_path, 0.1, 1, ("disk",), worker="tests.campaign.nobody")
