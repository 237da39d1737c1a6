"""Pytest plugin that writes each test's outcome to GPU_SUITE_LOG at once, one line of JSON each, so a stopped run keeps what it found."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    # workers of xdist send their reports to the process that they belong to, which writes them
    if "GPU_SUITE_LOG" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Log(Path(os.environ["GPU_SUITE_LOG"])), "gpu-suite-log")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """What a test is about travels with its report: reports of workers hold no items."""
    done = yield
    callspec = getattr(item, "callspec", None)
    done.get_result().about = {key: value for key, value in (callspec.params if callspec else {}).items() if isinstance(value, str)}


class _Log:
    def __init__(self, path: Path) -> None:
        self.path = path

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._write({"collected": item.nodeid})

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        for test in ids:
            self._write({"collected": test})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed or report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._write({"test": report.nodeid, "when": "collect", "outcome": report.outcome, "seconds": 0.0, "reason": reason})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reason = ""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2].removeprefix("Skipped: ")
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(report.longrepr) if crash is None else crash.message
        self._write(
            {
                # xdist appends the group to the name
                "test": report.nodeid.split("@")[0],
                "when": report.when,
                "outcome": "failed" if report.failed else "skipped" if report.skipped else "passed",
                "seconds": report.duration,
                "reason": reason[:2000],
                "about": getattr(report, "about", {}),
            }
        )
