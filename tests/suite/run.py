#!/usr/bin/python3
"""Runs rdma-core's test suite and writes down how each test ended, a line of JSON each.

    run.py TESTS REPORT            all tests, in one process
    run.py TESTS REPORT --each     all tests, each in a process of its own
    run.py TESTS REPORT ID         one test

TESTS is the folder that holds run_tests.py. A test in which a player (a process that it forks) was killed by a signal fails here; the
suite itself does not look at that.
"""
import json
import multiprocessing.process
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from importlib.machinery import SourceFileLoader

# Seconds that one test may take in a process of its own.
LIMIT = 180
# How much a report has of what a failed test and its players wrote, in bytes.
TAIL = 6000
# stdout and stderr.
OUTPUTS = (1, 2)
# The suite itself ends players that are stuck.
ENDED_BY_THE_SUITE = signal.SIGTERM


def load(folder):
    """All tests of the folder, as its run_tests.py loads them."""
    sys.path.insert(0, folder)
    sys.argv = [os.path.join(folder, "run_tests.py")]
    from args_parser import parser
    tests = SourceFileLoader("tests", os.path.join(folder, "__init__.py")).load_module()
    parser.parse_args()
    return list(flat(unittest.defaultTestLoader.loadTestsFromModule(tests)))


def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


class Result(unittest.TestResult):
    """Writes down each test as it ends."""

    def __init__(self, report):
        super().__init__()
        self.report = report
        self.outcome = None
        self.said = None

    def startTest(self, test):
        super().startTest(test)
        self.outcome = ("passed", "")
        self.said = Said()
        PLAYERS.clear()

    def stopTest(self, test):
        super().stopTest(test)
        killed = [player.exitcode for player in PLAYERS if (player.exitcode or 0) < 0]
        killed = [-code for code in killed if -code != ENDED_BY_THE_SUITE]
        if killed and self.outcome[0] != "failed":
            self.outcome = ("failed", f"a player was killed by signal {killed[0]}")
        said = self.said.end()
        if self.outcome[0] == "failed":
            self.outcome = ("failed", self.outcome[1] + said)
        write(self.report, test.id(), *self.outcome)

    def addError(self, test, err):
        super().addError(test, err)
        self.outcome = ("failed", self._exc_info_to_string(err, test))
        # What goes wrong before a class or module begins belongs to no test.
        if not isinstance(test, unittest.TestCase):
            write(self.report, test.id(), *self.outcome)

    addFailure = addError

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.outcome = ("failed", self._exc_info_to_string(err, test))

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.outcome = ("skipped", reason)

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.outcome = ("failed", "it passed, though it says that it fails")


class Said:
    """What this process and those that it forks write to stdout and stderr from now on: players tell there why they fail."""

    def __init__(self):
        self.file = tempfile.TemporaryFile()
        self.own = [os.dup(fd) for fd in OUTPUTS]
        for fd in OUTPUTS:
            os.dup2(self.file.fileno(), fd)

    def end(self):
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, own in zip(OUTPUTS, self.own):
            os.dup2(own, fd)
            os.close(own)
        with self.file as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            return file.read().decode(errors="replace")


# Processes that the running test started.
PLAYERS = []


def note_players():
    start = multiprocessing.process.BaseProcess.start

    def noted(self):
        start(self)
        PLAYERS.append(self)

    multiprocessing.process.BaseProcess.start = noted


def write(report, test, outcome, why):
    line = json.dumps({"test": test, "outcome": outcome, "why": why})
    with open(report, "a", encoding="utf-8") as file:
        file.write(line + "\n")


def run_each(folder, report, names):
    for name in names:
        before = os.path.getsize(report) if os.path.exists(report) else 0
        try:
            code = subprocess.run([sys.executable, __file__, folder, report, name], timeout=LIMIT).returncode
            why = f"its process was killed by signal {-code}" if code < 0 else f"its process ended with {code}"
        except subprocess.TimeoutExpired:
            why = f"it took longer than {LIMIT} s"
        after = os.path.getsize(report) if os.path.exists(report) else 0
        if after == before:
            write(report, name, "failed", why)


def main():
    folder, report, *which = sys.argv[1:]
    tests = load(folder)
    if which == ["--each"]:
        run_each(folder, report, [test.id() for test in tests])
        return
    chosen = [test for test in tests if not which or test.id() in which]
    note_players()
    unittest.TestSuite(chosen).run(Result(report))


main()
