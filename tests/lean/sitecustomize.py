"""Processes that tests start import Keras in two thirds of the time.

Keras tries to import scikit-learn and Matplotlib, for wrappers and plots that
no test uses. It does without them, as where they are not installed. Once Keras
is there, both can be imported. Python runs this file when it starts.
"""

import sys

_LEFT_OUT = ("matplotlib", "sklearn")


class _WhileKerasIsImported:
    def find_spec(self, name, path=None, target=None):
        keras = sys.modules.get("keras")
        spec = getattr(keras, "__spec__", None)
        if name in _LEFT_OUT and getattr(spec, "_initializing", False):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _WhileKerasIsImported())
