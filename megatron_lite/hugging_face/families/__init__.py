"""The families of transformers that this model can be: a file each, found by being in this folder.

Another family is one file with a FAMILY. The first that can hold a model is the one that it is exported as, in the
order of the file names.
"""

import importlib
import pkgutil

from megatron_lite.hugging_face.family import Family


def find_families() -> dict[str, Family]:
    """{architecture: family} of every file of the folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {family.architecture: family for family in families}


FAMILIES = find_families()
