"""What holds for every test: no verdict depends on chance, and this checkout is what is tested.

`pytest --random-examples` draws new examples for every property and prints the seed that repeats them; run it by hand,
as often as wanted.
"""

import os
import secrets
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine is no reason to fail: no test of ours is about speed.
settings.register_profile("fixed", deadline=None, derandomize=True)
settings.register_profile("random", deadline=None, derandomize=False, print_blob=True)
settings.load_profile("fixed")


# The programs that tests start import the package of this checkout, whichever one is installed.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)


class Share:
    """This process's part of tests that several processes run (tests/run.sh): a module is of the one that claims it.

    By whole modules, so that what their tests share is made once; claimed as they come, so that all end together.
    """

    def __init__(self, folder):
        self.folder, self.claimed = Path(folder), {}

    def claim(self, module):
        try:
            (self.folder / module.replace("/", "+")).touch(exist_ok=False)
            return True
        except FileExistsError:
            return False

    def mine(self, items):
        """Of the items mine, one after the other; a module is claimed when it is its turn."""
        for item in items:
            module = item.nodeid.partition("::")[0]
            if module not in self.claimed:
                self.claimed[module] = self.claim(module)
            if self.claimed[module]:
                yield item

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        if session.testsfailed or session.config.option.collectonly:
            return None  # what pytest's own loop says then
        items = self.mine(session.items)
        following = next(items, None)
        while (item := following) is not None:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return True


def pytest_addoption(parser):
    parser.addoption("--share", help="folder where processes that run the same tests claim modules")
    parser.addoption(
        "--random-examples", action="store_true", help="new random examples, with a printed seed"
    )


def pytest_configure(config):
    if config.getoption("--share"):
        config.pluginmanager.register(Share(config.getoption("--share")))
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
