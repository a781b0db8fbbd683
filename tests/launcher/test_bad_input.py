"""What can't be run is refused in a paragraph that says what, where and what to do."""

from __future__ import annotations

import pytest

from tests.launcher.bench import Bench

pytestmark = pytest.mark.forks

GOOD = "print('ran')"


def refusal(bench: Bench, *arguments: object) -> str:
    done = bench.run("run", *arguments, seconds=100)
    assert done.returncode not in (0, 1)
    assert "Traceback" not in done.stderr
    assert "ran" not in done.stdout
    return " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.py"], ["missing.py", "No such file"]),
        (["."], ["is a directory", "-m"]),
        (["syntax.py"], ["syntax.py", "line 2", "def oops(:"]),
        (["binary.py"], ["binary.py", "isn't a Python script"]),
        (["-m", "no_such_module"], ["no module named 'no_such_module'"]),
        (["-m", "good.py"], ["good.py", "leave -m out"]),
        (["-m", "json.no_such_part"], ["no module named 'json.no_such_part'"]),
        (["-m", "json"], ["package without a __main__", "json"]),
        (["-m", ""], ["no module named"]),
        (["-n", "0", "good.py"], ["number of ranks is 0", "-n 2"]),
        (["-n", "-1", "good.py"], ["number of ranks is -1"]),
        (["-n", "two", "good.py"], ["two", "-n"]),
        (["-n", "1.5", "good.py"], ["1.5", "-n"]),
        (["--threads", "0", "good.py"], ["threads per rank is 0"]),
        ([], ["SCRIPT"]),
        (["--no-such-option", "good.py"], ["--no-such-option"]),
        (["--nnodes", "0", "good.py"], ["number of hosts is 0"]),
        (["--nnodes", "2", "good.py"], ["--rdzv-endpoint"]),
        (["--nnodes", "2", "--rdzv-endpoint", "nowhere", "good.py"], ["nowhere", "HOST:PORT"]),
        (["--nnodes", "2", "--rdzv-endpoint", "a:b", "good.py"], ["a:b", "HOST:PORT"]),
        *(
            (["--nnodes", "2", "--rdzv-endpoint", endpoint, "good.py"], ["HOST:PORT"])
            for endpoint in (
                "fd88::1",
                "[fd88::1:29500",
                "[first]:29500",
                "[]:29500",
                "x[/nope]:29500",
                "http://first:29500",
                "first\nsecond:29500",
                "a b:29500",
                "..:29500",
                f"{'x' * 64}:29500",
                "first:\uff12\uff19",
                "first:0",
                f"first:{'1' * 5000}",
            )
        ),
        (
            ["--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "127.0.0.1:1", "good.py"],
            ["--node-rank", "2"],
        ),
        (["--node-rank", "0", "good.py"], ["--nnodes"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_run_refuses(bench: Bench, arguments: list[str], said: list[str]) -> None:
    bench.script(GOOD, "good.py")
    bench.script("x = 1\ndef oops(:\n    pass", "syntax.py")
    (bench.directory / "binary.py").write_bytes(b"\x7fELF\x00\x01\x02")
    message = refusal(bench, *arguments)
    for words in said:
        assert words in message


@pytest.mark.parametrize(
    "options", [["--node-rank", "1"], []], ids=["with a node rank", "without one"]
)
def test_run_names_an_endpoint_that_cannot_be_reached(bench: Bench, options: list[str]) -> None:
    bench.script(GOOD, "good.py")
    # An address that is reserved for documentation: it is nobody's.
    endpoint = "192.0.2.1:29500"
    message = refusal(
        bench, "--nnodes", 2, *options, "--rdzv-endpoint", endpoint, "--rdzv-timeout", 1, "good.py"
    )
    assert endpoint in message
    assert "1 seconds" in message


def test_script_that_raises_at_import_is_reported_as_a_failure(bench: Bench) -> None:
    script = bench.script("import no_such_thing")
    done = bench.run("run", "-n", 2, script)
    assert done.returncode == 1
    assert "failed first: exit code 1" in done.stderr
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in done.stderr


def test_module_whose_own_import_fails_shows_that_import(bench: Bench) -> None:
    bench.script("import no_such_thing", "package/__init__.py")
    bench.script(GOOD, "package/train.py")
    done = bench.run("run", "-n", 1, "-m", "package.train")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'no_such_thing'" in done.stderr
    assert "package/__init__.py" in done.stderr
