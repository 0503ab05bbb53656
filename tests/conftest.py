"""What holds for every test."""

from hypothesis import settings

# A busy machine is no reason to fail: no test of ours is about speed.
settings.register_profile("any-machine", deadline=None)
settings.load_profile("any-machine")
