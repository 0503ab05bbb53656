"""What holds for every test: no verdict depends on chance, and this checkout is what is tested.

`pytest --random-examples` draws new examples for every property and prints the seed that repeats them; run it by hand,
as often as wanted.
"""

import os
import secrets
from pathlib import Path

from hypothesis import settings

# A busy machine is no reason to fail: no test of ours is about speed.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("fixed")


# The programs that tests start import the package of this checkout, whichever one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)


def pytest_addoption(parser):
    parser.addoption(
        "--random-examples", action="store_true", help="new random examples, with a printed seed"
    )


def pytest_configure(config):
    if config.getoption("--random-examples"):
        settings.load_profile("random")
        if config.getoption("--hypothesis-seed") is None:
            config.option.hypothesis_seed = str(secrets.randbits(32))


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--random-examples"):
        seed = config.getoption("--hypothesis-seed")
        terminalreporter.write_line(
            f"random examples: --random-examples --hypothesis-seed={seed} repeats them"
        )
